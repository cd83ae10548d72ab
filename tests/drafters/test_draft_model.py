"""Drafter draft_model: a second whole model beside the trunk, its vocabulary, and what is refused."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from support import VOCAB, family_of, make, make_draft_model, prompt_of, request, run, tiny_model, varied_requests
from tiny_models import write_model
from transformers import AutoModelForCausalLM

from headstart.config import EngineConfig
from headstart.core import Rows
from headstart.engine.load import Model, load_model
from headstart.engine.matching import match, match_names, match_texts
from headstart.errors import ModelError, UsageError
from headstart.text.tokenizer import Tokenizer

EXACT = {"reference": "float64", "native": "float32"}


def written(family: str, **changes: Any) -> Path:
    return write_model(support.new_folder(), *family_of(family).tiny(**changes))


def loaded(backend: str, trunk: Path, draft: Path, **settings: Any) -> Model:
    wanted = {"drafter": "draft_model", "head": str(draft), "threads": 1, **settings}
    return load_model(str(trunk), EngineConfig(backend=backend, dtype=EXACT[backend], **wanted))


def engine_of(model: Model, backend: str, **settings: Any) -> Any:
    wanted = {"drafter": "draft_model", "depth": 3, "block_size": 16, **settings}
    return make(model, **{**support.SMALL, "backend": backend, "dtype": EXACT[backend], **wanted})


def tokens_of(outputs: support.Outputs) -> dict[Any, list[int]]:
    return {key: each.tokens for key, each in outputs.items()}


@pytest.mark.parametrize("backend", EXACT)
def test_the_model_itself_is_always_right(backend: str) -> None:
    """Also behind prefixes that another request has computed, and at any temperature: the noise is the same."""
    folder = written("llama")
    engine = engine_of(loaded(backend, folder, folder), backend)
    prompts = [prompt_of(30, 1), prompt_of(30, 1)[:20] + prompt_of(25, 2), prompt_of(30, 1)]
    for i, prompt in enumerate(prompts):
        run(engine, [request(prompt, name=f"r{i}", max_tokens=24, temperature=i % 2, stops=())])
    assert engine.scheduler.prefix_hits > 0 and engine.stats.drafted == engine.stats.accepted > 40


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}, {"kv_blocks": 10}, {"depth": "auto"}])
def test_rows_are_computed_once(settings: dict[str, Any]) -> None:
    """Keys of guesses that came true stay: one row for each pass, but for the last guess, whose keys nobody needed."""
    folder = written("llama")
    engine = engine_of(loaded("native", folder, folder), "native", **settings)
    rows: list[int] = []
    original = engine.runner.run

    def noted(handle: Any, program: str, parts: list[Rows], **more: Any) -> Any:
        if handle is not engine.runner.trunk and len(parts) == 1:
            rows.append(len(parts[0].token_ids))
        return original(handle, program, parts, **more)

    engine.runner.run = noted
    expected = run(engine_of(replace(loaded("native", folder, folder), head=None), "native", drafter="none"), REQUESTS)
    assert tokens_of(run(engine, REQUESTS)) == tokens_of(expected)
    if not settings:
        assert max(rows[1:]) == 2


REQUESTS = [request(prompt_of(21, 3), max_tokens=30, stops=())]


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("deepseek_v3", "mimo", "qwen3_moe")]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", *SLOW])
@pytest.mark.parametrize("drafter", ["draft_model", "mixed"])
def test_any_family_beside_any_other(family: str, drafter: str) -> None:
    """Penalties, biases, grammars' masks, several choices: the trunk's own pipeline, on other logits."""
    depth = "auto" if drafter == "mixed" else 4
    model = replace(tiny_model("llama"), head=make_draft_model(tiny_model("llama"), family))
    for temperature in (0.0, 1.0):
        plain = run(make(model, drafter="none"), varied_requests(temperature))
        engine = make(model, drafter=drafter, depth=depth, kv_blocks=24, max_num_batched_tokens=40)
        assert tokens_of(run(engine, varied_requests(temperature))) == tokens_of(plain)
        if drafter == "draft_model":
            assert engine.stats.drafted > 100


@pytest.mark.slow
def test_rule_rejection_takes_its_distributions() -> None:
    engine = make(support.headed_model("llama", "draft_model"), drafter="draft_model", depth=3, rule="rejection")
    run(engine, varied_requests(1.0))
    assert engine.stats.drafted > 50


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_its_own_head_saves_passes_and_changes_no_draft(temperature: float) -> None:
    """Chunks of the prompt, several sequences, preemption; the head guesses right often, and sometimes wrong."""
    whole = support.agreeing_model("llama")
    draft_model = make_draft_model(whole)
    requests = [
        request(prompt_of(9 + 20 * i, i), name=f"r{i}", max_tokens=40, stops=(), temperature=temperature)
        for i in range(3)
    ]
    drafts: list[list[list[int]]] = []
    passes: list[int] = []
    for head in (None, whole.head):
        own = replace(draft_model, whole=replace(whole, head=head))
        engine = make(replace(whole, head=own), drafter="draft_model", depth=6, max_num_batched_tokens=24, kv_blocks=18)
        drafter, original = engine.drafting.drafter, engine.runner.run
        passes.append(0)
        drafts.append([])

        def noted(handle: Any, *arguments: Any, drafter: Any = drafter, original: Any = original, **more: Any) -> Any:
            passes[-1] += handle is drafter._network
            return original(handle, *arguments, **more)

        def propose(asked: Any, original: Any = drafter.propose) -> None:
            original(asked)
            drafts[-1].append([each.sequence.draft.tokens for each in asked])

        engine.runner.run, drafter.propose = noted, propose
        found = tokens_of(run(engine, requests))
        assert found == tokens_of(run(make(replace(whole, head=None), drafter="none"), requests))
    assert drafts[0] == drafts[1] and any(len(each) == 6 for step in drafts[0] for each in step)
    assert passes[1] < 0.8 * passes[0]


def test_a_shorter_context_of_the_draft_model_ends_its_drafts() -> None:
    engine = engine_of(loaded("native", written("llama"), written("llama", max_position_embeddings=32)), "native")
    assert len(run(engine, REQUESTS)["r", 0].tokens) == 30 and 0 < engine.stats.drafted == engine.stats.accepted < 15


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_pard_model_drafts_in_one_pass(backend: str, tmp_path: Path) -> None:
    """AMD's pard_infer.py: the tokens and, behind them, mask tokens through the whole model, which transformers runs
    here. The text is the trunk's, in chunks too, and with a mask that is no token of the trunk."""
    config, arrays = family_of("qwen3").tiny(num_hidden_layers=2, vocab_size=VOCAB + 5)
    draft, mask = write_model(tmp_path / "draft", {**config, "pard_token": VOCAB + 2}, arrays), VOCAB + 2
    theirs = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float64, attn_implementation="eager")
    model = loaded(backend, written("llama"), draft)
    assert model.head.spec.depth_limit == 12
    plain = run(engine_of(model, backend, drafter="none"), varied_requests(0.8))
    engine = engine_of(model, backend, depth=4, max_num_batched_tokens=24)
    propose, same = engine.drafting.drafter.propose, list[bool]()

    def noted(requests: Any) -> None:
        propose(requests)
        for sequence in [each.sequence for each in requests if each.sequence.request.params.temperature == 0]:
            ids, count = sequence.tokens, len(sequence.draft.tokens)
            with torch.inference_mode():
                logits = theirs(torch.tensor([[*ids, *[mask] * (count - 1)]])).logits[0, -count:, :VOCAB]
            same.extend(a == b for a, b in zip(logits.argmax(-1).tolist(), sequence.draft.tokens, strict=True))

    engine.drafting.drafter.propose = noted
    assert tokens_of(run(engine, varied_requests(0.8))) == tokens_of(plain)
    run(engine, [request(prompt_of(21, 3), name="greedy", max_tokens=20, stops=(), temperature=0.0)])
    assert len(same) > 40 and np.mean(same) > 0.97 and engine.stats.drafted > 100


WORDS = {f"w{i}": i for i in range(200)}


matched = partial(match_names, WORDS)


def test_vocabularies_are_matched() -> None:
    """Padding is no difference, a few tokens elsewhere are mapped, another vocabulary is none."""
    assert matched(WORDS, (200, 200)) == matched(WORDS, (256, 200)) == (range(200), None, None)
    assert matched(WORDS, (200, 256)) == (range(200), list(range(200)), None)
    found = matched({**WORDS, "w0": 200, "new": 0}, (200, 201))
    assert (found.ids, found.rows) == (list(range(200)), [200, *range(1, 200)])
    assert found.own_ids(200).tolist() == [200, *range(1, 200)]
    others = {(token if i % 2 else f"x{i}"): i for token, i in WORDS.items()}
    assert matched(others, (200, 200)) is None


@pytest.mark.parametrize("size", [VOCAB - 3, VOCAB + 29])
def test_rows_more_or_less_draft_all_the_same(size: int) -> None:
    trunk, draft = written("llama"), written("qwen3", vocab_size=size)
    model = loaded("native", trunk, draft)
    plain = run(engine_of(model, "native", drafter="none"), varied_requests(0.8))
    engine = engine_of(model, "native")
    assert tokens_of(run(engine, varied_requests(0.8))) == tokens_of(plain) and engine.stats.drafted > 100


def test_tokens_at_other_places_draft_all_the_same(tmp_path: Path) -> None:
    """The model itself with two tokens exchanged is as right as the model itself."""
    config, arrays = family_of("llama").tiny()
    trunk, order = write_model(tmp_path / "trunk", config, arrays), np.arange(VOCAB)
    order[[20, 40]] = [40, 20]
    moved = {name: array[order] if array.shape[0] == VOCAB else array for name, array in arrays.items()}
    draft = write_model(tmp_path / "draft", config, moved)
    document = json.loads((draft / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    names = {index: token for token, index in vocab.items()}
    vocab[names[20]], vocab[names[40]] = 40, 20
    (draft / "tokenizer.json").write_text(json.dumps(document))
    engine = engine_of(loaded("native", trunk, draft), "native")
    nameless = dict.fromkeys(range(len(names), VOCAB), -100.0)
    run(engine, [request(range(3, 60), max_tokens=30, stops=(), logit_bias=nameless)])
    assert engine.stats.drafted == engine.stats.accepted > 10


def reversed_tokens(folder: Path, family: str = "llama") -> tuple[Path, Path, dict[str, int], dict[str, int]]:
    """A model, and the same one with its tokens in the reverse order and a few of them missing; their vocabularies."""
    config, arrays = family_of(family).tiny()
    trunk, missing = write_model(folder / "trunk", config, arrays), {"the", "\u0120the", "ing"}
    document = json.loads((trunk / "tokenizer.json").read_text())
    ids, inner = document["model"]["vocab"], document["model"]
    kept = [name for name in sorted(ids, key=ids.get, reverse=True) if name not in missing]
    inner["vocab"] = vocab = {name: index for index, name in enumerate(kept)}
    inner["merges"] = [each for each in inner["merges"] if "".join(each).replace(" ", "") not in missing]
    document["added_tokens"] = [{**each, "id": vocab[each["content"]]} for each in document["added_tokens"]]
    order = [*[ids[name] for name in kept], *[0] * (VOCAB - len(kept))]
    moved = {name: array[order] if array.shape[0] == VOCAB else array for name, array in arrays.items()}
    draft = write_model(folder / "draft", {**config, "eos_token_id": vocab["<|im_end|>"]}, moved)
    (draft / "tokenizer.json").write_text(json.dumps(document))
    return trunk, draft, ids, vocab


@pytest.mark.parametrize("family", ["llama", "mimo"])
def test_another_tokenizer_drafts_by_text(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Drafts that are tokenized again are accepted where both models write the same, and change no text. A draft model
    with a head of its own drafts with it."""
    trunk, draft, ids, vocab = reversed_tokens(tmp_path, family)
    model = loaded("native", trunk, draft, drafter="draft_model")
    assert "has another tokenizer than" in caplog.text
    engine = engine_of(model, "native")
    missing = [ids[name] for name in ids.keys() - vocab.keys()]
    unknown = dict.fromkeys([*range(3), *missing, *range(len(ids), VOCAB)], -100.0)
    run(engine, [request(range(3, 60), max_tokens=30, stops=(), logit_bias=unknown)])
    assert engine.stats.accepted >= 5 and engine.stats.drafted < 2 * engine.stats.accepted
    plain = run(engine_of(model, "native", drafter="none"), varied_requests(0.8))
    assert tokens_of(run(engine, varied_requests(0.8))) == tokens_of(plain)
    own = engine.drafting.drafter._texts._engine
    assert (own.stats.drafted > 0) is (family == "mimo") is (model.head.whole.head is not None)


@pytest.mark.parametrize(
    ("before", "after"),
    [("def f(", "x):\n"), ("return the", "se things"), ("gr\u00fc", "\u00dfe an alle"), ("x y", " z")],
)
def test_a_text_is_tokenized_again_behind_the_trunks_tokens(tmp_path: Path, before: str, after: str) -> None:
    """With the trunk's tokens where the whole text has a border there, else by itself."""
    trunk, draft, *_ = reversed_tokens(tmp_path)
    model = loaded("native", trunk, draft)
    drafter = engine_of(model, "native").drafting.drafter
    ours, theirs = model.head.tokenizers
    tokens = ours.encode(before)
    assert drafter._own_tokens(tokens, 4) == theirs.encode(before)
    assert drafter._own_tokens(ours.encode("\u00fc")[:1], 4) == []  # inside a character
    found = drafter._trunk_tokens(tokens, theirs.encode(after))
    assert b"".join(map(ours.token_bytes, [*tokens, *found])).decode() == before + after
    whole = ours.encode(before + after)
    assert found == (whole[len(tokens) :] if whole[: len(tokens)] == tokens else ours.encode(after))
    assert drafter._trunk_tokens(tokens, [min(theirs.special_ids), *theirs.encode(after)]) == []


def test_tokens_with_equal_texts(tmp_path: Path) -> None:
    """For models that draft several tokens in one pass."""
    trunk, draft, ids, vocab = reversed_tokens(tmp_path)
    ours, theirs = (Tokenizer.from_directory(each) for each in (trunk, draft))
    found = match_texts(ours, theirs, (VOCAB, VOCAB))
    own = found.own_ids(VOCAB)
    assert own is not None and own[ids["the"]] == vocab["e"] and own[ids["er"]] == vocab["er"]
    assert match(ours, theirs, (VOCAB, VOCAB), ("a", "b"), by_token=True).rows == found.rows


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    trunk, model = written("llama"), tiny_model("llama")
    spec = support.eagle3_spec(model)
    head = support.write_head(tmp_path / "head", model.config, spec, support.eagle3_arrays(model, spec))
    for draft, drafter, said in (
        (written("qwen3_next"), "draft_model", "has recurrent layers, which cannot draft yet"),
        (trunk, "auto", "without an MTP head of its own, and not smaller"),
        (trunk, "mtp", "without an MTP head of its own"),
        (head, "draft_model", "is a head of kind eagle3, not a whole model"),
    ):
        with pytest.raises(ModelError, match=said):
            loaded("native", trunk, draft, drafter=drafter)
    with pytest.raises(UsageError, match="needs a second, smaller model"):
        load_model(str(trunk), EngineConfig(drafter="draft_model", threads=1))


def test_a_smaller_model_needs_no_word() -> None:
    model = loaded("native", written("llama"), written("llama", num_hidden_layers=1), drafter="auto")
    assert model.head.spec.kind == "draft_model"
