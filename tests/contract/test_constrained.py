"""Constrained decoding: the text equals plain decoding and satisfies the constraint."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import support
from support import DRAFTERS, EOS, VOCAB, agreeing_model, assert_same, headed_model, make, request, run, varied_requests

from headstart.core import Request
from headstart.engine.load import Model
from headstart.text.grammar import GrammarCompiler, GrammarSpec
from headstart.tools.verify.options import pairwise

FAMILY = "mimo"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
CHOICES = ["the other thing", "the order", "nothing"]
DATE = r"20\d{2}-(0[1-9]|1[0-2])-[0-3]\d in the (ring|inn)"


def is_pet(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["kind", "legs"] and found["kind"] in ("cat", "dog") and found["legs"] in range(9)


SPECS: dict[str, tuple[GrammarSpec, Callable[[str], Any]]] = {
    "json_schema": (GrammarSpec("json_schema", SCHEMA), is_pet),
    "regex": (GrammarSpec("regex", DATE), re.compile(DATE).fullmatch),
    "choice": (GrammarSpec("choice", CHOICES), CHOICES.__contains__),
    "grammar": (GrammarSpec("grammar", 'root ::= [0-9]+ ("+" [0-9]+)*\n'), re.compile(r"\d+(\+\d+)*").fullmatch),
}
VARIETY: tuple[dict[str, Any], ...] = (
    {"n": 2, "logprobs": 1},
    {"top_p": 0.8, "repetition_penalty": 1.2},
    {"min_tokens": 6, "top_k": 5},
    {"logit_bias": {40: 3.0, EOS: 2.0}, "frequency_penalty": 0.4, "min_p": 0.01},
)
FACTORS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0), "depth": (1, 3, 5), "max_num_seqs": (1, 8), "max_num_batched_tokens": (20, 512),
    "kv_blocks": (16, 200),
}  # fmt: skip
CELLS = pairwise(FACTORS)
CROWDED = [cell for cell in CELLS if cell["max_num_seqs"] > 1 and cell["kv_blocks"] < 200 and cell["depth"] > 1]
"""Batches that run out of blocks: constraints are walked forward again after preemption."""


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(headed_model(FAMILY).tokenizer, VOCAB)


def requests_of(temperature: float) -> list[Request]:
    """Requests with each kind of constraint and various sampling parameters, among requests without constraints."""
    free, bound = varied_requests(temperature)[:4], []
    for i, ((kind, (spec, _)), extra) in enumerate(zip(SPECS.items(), VARIETY, strict=True)):
        settings = {"name": kind, "seed": i, "temperature": temperature, "max_tokens": 90, **extra}
        bound.append(request(support.prompt_of(9 * i + 1, i), constraint=compiler().compile(spec), **settings))
    return [each for pair in zip(free, bound, strict=True) for each in pair]


@cache
def plain(temperature: float, agreeing: bool = False) -> support.Outputs:
    model = (agreeing_model if agreeing else headed_model)(FAMILY)
    settings = {"drafter": "none", "max_num_seqs": 1, "enable_prefix_caching": False}
    return run(make(model, **settings), requests_of(temperature))


def text_of(tokens: list[int]) -> str:
    return headed_model(FAMILY).tokenizer.decode([token for token in tokens if token != EOS])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", FACTORS["temperature"])
@pytest.mark.parametrize("agreeing", [False, True])
def test_texts_satisfy_the_constraints(agreeing: bool, temperature: float) -> None:
    ends = 0
    for (kind, _), output in plain(temperature, agreeing).items():
        if kind in SPECS and output.finish_reason == "stop":
            assert SPECS[kind][1](text_of(output.tokens)), (kind, text_of(output.tokens))
            ends += 1
        if kind == "regex":  # nothing can follow, so the text ends without an end-of-text token
            assert output.finish_reason == "stop" and output.tokens[-1] != EOS
    assert ends >= 3, "most texts ran into max_tokens"


def assert_same_as_plain(model: Model, drafter: str, cell: dict[str, Any], agreeing: bool = False) -> tuple[int, int]:
    """Runs one cell and compares with plain decoding; returns forced tokens and preemptions."""
    engine = make(model, drafter=drafter, **{name: value for name, value in cell.items() if name != "temperature"})
    outputs = run(engine, requests_of(cell["temperature"]))
    assert_same(outputs, plain(cell["temperature"], agreeing))
    for output in outputs.values():
        stats = output.stats
        assert stats.emitted == len(output.tokens) <= stats.passes + stats.accepted + stats.forced
        assert stats.accepted == sum(stats.per_position) and stats.drafted == sum(stats.drafted_at)
    return engine.stats.forced, engine.scheduler.num_preemptions


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [*DRAFTERS, "none"])
def test_drafters_keep_constrained_texts(drafter: str) -> None:
    kinds = ("eagle3", "peagle", "medusa", "draft_model", "block")
    model = headed_model(FAMILY, drafter if drafter in kinds else "mtp")
    found = [assert_same_as_plain(model, drafter, cell) for cell in CROWDED]
    forced, preemptions = map(sum, zip(*found, strict=True))
    assert preemptions > 0, "no cell ran out of blocks"
    assert forced > 15 * len(CROWDED) if drafter != "none" else forced == 0


@pytest.mark.slow
def test_pairs_of_settings_keep_constrained_texts() -> None:
    for cell in CELLS:
        if cell not in CROWDED:
            assert_same_as_plain(headed_model(FAMILY), "mixed", cell)


@pytest.mark.slow
def test_accepted_drafts_keep_constrained_texts() -> None:
    for cell in CROWDED:
        assert_same_as_plain(agreeing_model(FAMILY), "mtp", cell, agreeing=True)


@pytest.mark.slow
def test_draft_ends_if_the_draft_vocabulary_has_no_allowed_token() -> None:
    """With half of the ids in the draft vocabulary, many masks allow none of them."""
    model = headed_model(FAMILY)
    model = replace(model, head=support.make_head(model, draft_ids=range(0, VOCAB, 2)))
    for cell in CROWDED:
        assert_same_as_plain(model, "mtp", cell)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_rejection_keeps_the_constraint(drafter: str) -> None:
    outputs = run(make(headed_model(FAMILY), drafter=drafter, rule="rejection", depth=4), requests_of(1.0))
    for (kind, _), output in outputs.items():
        if kind in SPECS and output.finish_reason == "stop":
            assert SPECS[kind][1](text_of(output.tokens))
    assert sum(output.finish_reason == "stop" for (kind, _), output in outputs.items() if kind in SPECS) >= 3


LONG = "the other thing in the ring"


def constrained_output(
    drafter: str, text: str, request_depth: int | None = None, max_tokens: int = 60, **settings: Any
) -> Any:
    """The output of a request whose only allowed text is `text`."""
    engine = make(headed_model(FAMILY), drafter=drafter, **{"depth": 2, **settings})
    constraint = compiler().compile(GrammarSpec("choice", [text]))
    return run(engine, [request([5, 6, 7], constraint=constraint, depth=request_depth, max_tokens=max_tokens)])["r", 0]


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_forced_tokens_share_a_pass(drafter: str) -> None:
    found = constrained_output(drafter, LONG)
    assert text_of(found.tokens) == LONG and found.finish_reason == "stop"
    assert (found.stats.emitted, found.stats.forced) == (len(found.tokens), len(found.tokens) - 1)
    assert found.stats.passes == 2, "a pass for the first token, and one for the others"
    assert (found.stats.drafts, found.stats.drafted, found.stats.accepted) == (0, 0, 0)
    narrow = constrained_output(drafter, LONG, max_num_batched_tokens=4)
    assert narrow.tokens == found.tokens and narrow.stats.passes > 4


def test_depth_0_disables_forced_tokens_and_drafts_stop_at_max_tokens() -> None:
    for found in (
        constrained_output("mtp", LONG, request_depth=0),
        constrained_output("none", LONG),
        constrained_output("mtp", LONG, depth=0),
    ):
        assert found.stats.forced == 0 and found.stats.passes == len(found.tokens)
    found = constrained_output("mtp", LONG, max_tokens=5)
    assert (len(found.tokens), found.finish_reason, found.stats.passes) == (5, "length", 2)


def test_prompt_lookup_drafts_only_allowed_tokens() -> None:
    """In the prompt a letter follows every digit: the constraint allows one letter or none."""
    prompt = compiler()._tokenizer.encode("0ab1ab2ab3ab4ab5ab6ab7ab8ab9ab")
    for pattern, drafted in (("[0-9][2-8]", 0), ("[0-9][a-c][2-8]", 1)):
        engine = make(headed_model(FAMILY), drafter="ngram", depth=4, ngram_min=1)
        bound = request(prompt, constraint=compiler().compile(GrammarSpec("regex", pattern)), max_tokens=9)
        assert_same(run(engine, [bound]), run(make(headed_model(FAMILY), drafter="none"), [bound]))
        assert engine.stats.drafted == drafted
        assert engine.runner.num_rows == len(prompt) + engine.stats.passes - 1 + drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammar_overrides_min_tokens(temperature: float) -> None:
    (a, b) = compiler()._tokenizer.encode("ab")

    def output(spec: GrammarSpec, **params: Any) -> Any:
        bound = request([5, 6], constraint=compiler().compile(spec), temperature=temperature, min_tokens=5, **params)
        found = [run(make(headed_model(FAMILY), drafter=d), [bound])["r", 0] for d in ("none", "mtp")]
        assert found[0].tokens == found[1].tokens and found[0].finish_reason == found[1].finish_reason == "stop"
        return found[0].tokens

    assert output(GrammarSpec("choice", ["ab"])) == [a, b], "shorter than min_tokens"
    assert output(GrammarSpec("choice", ["ab", "aa"]), stop_token_ids=(a, b)) == [a], "no other token is allowed"
    assert output(GrammarSpec("regex", "[ab]*"), stop_token_ids=(b,), logit_bias={b: 50.0})[:5] == [a] * 5
