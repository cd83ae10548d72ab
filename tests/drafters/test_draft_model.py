"""Drafter `draft_model`: a second model beside the trunk, matching of vocabularies, refused models."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from lora_files import random_adapter
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


def model_folder(family: str, **changes: Any) -> Path:
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
def test_drafts_of_the_trunk_itself_are_always_accepted(backend: str) -> None:
    """After prefix hits and at any temperature, since draft model and trunk use the same noise."""
    folder = model_folder("llama")
    engine = engine_of(loaded(backend, folder, folder), backend)
    prompts = [prompt_of(30, 1), prompt_of(30, 1)[:20] + prompt_of(25, 2), prompt_of(30, 1)]
    for i, prompt in enumerate(prompts):
        run(engine, [request(prompt, name=f"r{i}", max_tokens=24, temperature=i % 2, stops=())])
    assert engine.scheduler.prefix_hits > 0 and engine.stats.drafted == engine.stats.accepted > 40


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}, {"kv_blocks": 10}, {"depth": "auto"}])
def test_rows_are_computed_once(settings: dict[str, Any]) -> None:
    """Keys of accepted draft tokens stay: a pass computes one new row, and one more if the last draft token is
    accepted, whose keys are not computed while drafting."""
    folder = model_folder("llama")
    engine = engine_of(loaded("native", folder, folder), "native", **settings)
    rows: list[int] = []
    original = engine.runner.run

    def recording_run(handle: Any, program: str, parts: list[Rows], **more: Any) -> Any:
        if handle is not engine.runner.trunk and len(parts) == 1:
            rows.append(len(parts[0].token_ids))
        return original(handle, program, parts, **more)

    engine.runner.run = recording_run
    expected = run(engine_of(replace(loaded("native", folder, folder), head=None), "native", drafter="none"), REQUESTS)
    assert tokens_of(run(engine, REQUESTS)) == tokens_of(expected)
    if not settings:
        assert max(rows[1:]) == 2


REQUESTS = [request(prompt_of(21, 3), max_tokens=30, stops=())]


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("deepseek_v3", "mimo", "qwen3_moe")]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", *SLOW])
@pytest.mark.parametrize("drafter", ["draft_model", "mixed"])
def test_draft_models_of_other_families_keep_the_text(family: str, drafter: str) -> None:
    """Sampling parameters, grammars and several choices apply to the draft model's logits as to the trunk's."""
    depth = "auto" if drafter == "mixed" else 4
    model = replace(tiny_model("llama"), head=make_draft_model(tiny_model("llama"), family))
    for temperature in (0.0, 1.0):
        plain = run(make(model, drafter="none"), varied_requests(temperature))
        engine = make(model, drafter=drafter, depth=depth, kv_blocks=24, max_num_batched_tokens=40)
        assert tokens_of(run(engine, varied_requests(temperature))) == tokens_of(plain)
        if drafter == "draft_model":
            assert engine.stats.drafted > 100


@pytest.mark.slow
def test_draft_model_drafts_with_rule_rejection() -> None:
    engine = make(support.headed_model("llama", "draft_model"), drafter="draft_model", depth=3, rule="rejection")
    run(engine, varied_requests(1.0))
    assert engine.stats.drafted > 50


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_head_of_the_draft_model_saves_passes_and_keeps_drafts(temperature: float) -> None:
    """Prompt chunks, several sequences, preemption; most tokens of the head are accepted, some rejected."""
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

        def recording_run(
            handle: Any, *arguments: Any, drafter: Any = drafter, original: Any = original, **more: Any
        ) -> Any:
            passes[-1] += handle is drafter._network
            return original(handle, *arguments, **more)

        def propose(submitted: Any, original: Any = drafter.propose) -> None:
            original(submitted)
            drafts[-1].append([each.sequence.draft.tokens for each in submitted])

        engine.runner.run, drafter.propose = recording_run, propose
        found = tokens_of(run(engine, requests))
        assert found == tokens_of(run(make(replace(whole, head=None), drafter="none"), requests))
    assert drafts[0] == drafts[1] and any(len(each) == 6 for step in drafts[0] for each in step)
    assert passes[1] < 0.8 * passes[0]


def test_drafting_ends_at_the_context_length_of_the_draft_model() -> None:
    engine = engine_of(
        loaded("native", model_folder("llama"), model_folder("llama", max_position_embeddings=32)), "native"
    )
    assert len(run(engine, REQUESTS)["r", 0].tokens) == 30 and 0 < engine.stats.drafted == engine.stats.accepted < 15


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_pard_model_drafts_in_one_pass(backend: str, tmp_path: Path) -> None:
    """The draft is that of AMD's pard_infer.py, computed here with transformers: the tokens and then mask tokens
    through the whole model. The text stays the trunk's, in chunks too, and with a mask token outside the trunk's
    vocabulary."""
    config, arrays = family_of("qwen3").tiny(num_hidden_layers=2, vocab_size=VOCAB + 5)
    draft, mask = write_model(tmp_path / "draft", {**config, "pard_token": VOCAB + 2}, arrays), VOCAB + 2
    theirs = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float64, attn_implementation="eager")
    model = loaded(backend, model_folder("llama"), draft)
    assert model.head.spec.depth_limit == 12
    plain = run(engine_of(model, backend, drafter="none"), varied_requests(0.8))
    engine = engine_of(model, backend, depth=4, max_num_batched_tokens=24)
    propose, same = engine.drafting.drafter.propose, list[bool]()

    def recording_run(requests: Any) -> None:
        propose(requests)
        for sequence in [each.sequence for each in requests if each.sequence.request.params.temperature == 0]:
            ids, count = sequence.tokens, len(sequence.draft.tokens)
            with torch.inference_mode():
                logits = theirs(torch.tensor([[*ids, *[mask] * (count - 1)]])).logits[0, -count:, :VOCAB]
            same.extend(a == b for a, b in zip(logits.argmax(-1).tolist(), sequence.draft.tokens, strict=True))

    engine.drafting.drafter.propose = recording_run
    assert tokens_of(run(engine, varied_requests(0.8))) == tokens_of(plain)
    run(engine, [request(prompt_of(21, 3), name="greedy", max_tokens=20, stops=(), temperature=0.0)])
    assert len(same) > 40 and np.mean(same) > 0.97 and engine.stats.drafted > 100


WORDS = {f"w{i}": i for i in range(200)}


match_words = partial(match_names, WORDS)


def test_vocabularies_are_matched() -> None:
    """Padding is ignored, a few moved tokens are mapped, other vocabularies do not match."""
    assert match_words(WORDS, (200, 200)) == match_words(WORDS, (256, 200)) == (range(200), None, None)
    assert match_words(WORDS, (200, 256)) == (range(200), list(range(200)), None)
    found = match_words({**WORDS, "w0": 200, "new": 0}, (200, 201))
    assert (found.ids, found.rows) == (list(range(200)), [200, *range(1, 200)])
    assert found.own_ids(200).tolist() == [200, *range(1, 200)]
    others = {(token if i % 2 else f"x{i}"): i for token, i in WORDS.items()}
    assert match_words(others, (200, 200)) is None


@pytest.mark.parametrize("size", [VOCAB - 3, VOCAB + 29])
def test_draft_model_with_other_vocabulary_size_keeps_the_text(size: int) -> None:
    trunk, draft = model_folder("llama"), model_folder("qwen3", vocab_size=size)
    model = loaded("native", trunk, draft)
    plain = run(engine_of(model, "native", drafter="none"), varied_requests(0.8))
    engine = engine_of(model, "native")
    assert tokens_of(run(engine, varied_requests(0.8))) == tokens_of(plain) and engine.stats.drafted > 100


def test_draft_model_with_exchanged_token_ids_is_accepted(tmp_path: Path) -> None:
    """The trunk itself with two tokens exchanged: all its drafts are accepted."""
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
    """A model, the same model with reversed token ids and a few tokens missing, and the vocabularies of both."""
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
def test_draft_model_with_other_tokenizer_drafts_by_text(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Retokenized drafts are accepted where both models write the same text, and never change the text. A draft model
    with a head drafts with that head."""
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
    adapted = engine_of(model, "native", lora=(str(random_adapter(trunk, 1)),))
    assert adapted.adapters.loaded and not adapted.drafting.drafter._texts._engine.adapters.loaded


@pytest.mark.parametrize(
    ("before", "after"),
    [("def f(", "x):\n"), ("return the", "se things"), ("gr\u00fc", "\u00dfe an alle"), ("x y", " z")],
)
def test_draft_text_is_retokenized_after_the_tokens_of_the_trunk(tmp_path: Path, before: str, after: str) -> None:
    """Uses the trunk's tokens of the whole text if a token ends where the draft begins, else the draft's own."""
    trunk, draft, *_ = reversed_tokens(tmp_path)
    model = loaded("native", trunk, draft)
    drafter = engine_of(model, "native").drafting.drafter
    ours, theirs = model.head.tokenizers
    tokens = ours.encode(before)
    assert drafter._own_tokens(tokens, 4) == theirs.encode(before)
    assert drafter._own_tokens(ours.encode("\u00fc")[:1], 4) == []  # in the middle of a character
    found = drafter._trunk_tokens(tokens, theirs.encode(after))
    assert b"".join(map(ours.token_bytes, [*tokens, *found])).decode() == before + after
    whole = ours.encode(before + after)
    assert found == (whole[len(tokens) :] if whole[: len(tokens)] == tokens else ours.encode(after))
    assert drafter._trunk_tokens(tokens, [min(theirs.special_ids), *theirs.encode(after)]) == []


def test_tokens_are_matched_by_text(tmp_path: Path) -> None:
    """Used for models that draft several tokens in one pass."""
    trunk, draft, ids, vocab = reversed_tokens(tmp_path)
    ours, theirs = (Tokenizer.from_directory(each) for each in (trunk, draft))
    found = match_texts(ours, theirs, (VOCAB, VOCAB))
    own = found.own_ids(VOCAB)
    assert own is not None and own[ids["the"]] == vocab["e"] and own[ids["er"]] == vocab["er"]
    assert match(ours, theirs, (VOCAB, VOCAB), ("a", "b"), by_token=True).rows == found.rows


def test_models_that_cannot_draft_are_refused(tmp_path: Path) -> None:
    trunk, model = model_folder("llama"), tiny_model("llama")
    spec = support.eagle3_spec(model)
    head = support.write_head(tmp_path / "head", model.config, spec, support.eagle3_arrays(model, spec))
    for draft, drafter, message in (
        (model_folder("qwen3_next"), "draft_model", "has recurrent layers, which cannot draft yet"),
        (trunk, "auto", "without an MTP head of its own, and not smaller"),
        (trunk, "mtp", "without an MTP head of its own"),
        (head, "draft_model", "is a head of kind eagle3, not a whole model"),
    ):
        with pytest.raises(ModelError, match=message):
            loaded("native", trunk, draft, drafter=drafter)
    with pytest.raises(UsageError, match="needs a second, smaller model"):
        load_model(str(trunk), EngineConfig(drafter="draft_model", threads=1))


def test_smaller_model_is_a_draft_model_by_default() -> None:
    model = loaded("native", model_folder("llama"), model_folder("llama", num_hidden_layers=1), drafter="auto")
    assert model.head.spec.kind == "draft_model"
