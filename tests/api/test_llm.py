"""LLM on tiny directories: text, streams, stop strings, seeds, logprobs, prompts of every kind."""

import copy
import gc
import json
import pickle
import re
import subprocess
import sys
import weakref
from dataclasses import asdict, replace
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import BaseModel, WithJsonSchema
from support import EOS, SMALL, VOCAB, agreeing_model, assert_clean, headed_model
from tiny_models import write_tiny

from headstart.api import LLM, Completion
from headstart.api.llm import as_grammar
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.errors import CapacityError, GenerationError, ModelError, UsageError
from headstart.text.chat import ChatTemplate
from headstart.text.grammar_spec import GrammarSpec

FAMILY = "mimo"
MODELS = {"random": headed_model, "agreeing": agreeing_model}


def llm(kind: str = "random", **settings: Any) -> LLM:
    return LLM(MODELS[kind](FAMILY), EngineConfig(**{**SMALL, "dtype": "float64", "max_model_len": 256, **settings}))


PLAIN: dict[str, Any] = {"drafter": "none", "max_num_seqs": 1, "enable_prefix_caching": False}
PROMPTS = ["the thing", "an answer about the inner ring", "x", "hello there, you"]


def text_of(each: LLM, completion: Completion) -> str:
    """The decoded token ids of a completion."""
    return each.tokenizer.decode([t for t in completion.token_ids if t not in each.tokenizer.eos_ids])


# Loading.


def test_from_a_directory(tmp_path) -> None:
    folder = write_tiny(FAMILY, tmp_path / "model", num_hidden_layers=2)
    each = LLM(folder, EngineConfig(threads=1, kv_blocks=40))
    assert each.method == "mtp"
    assert each.load_s > 0
    assert each.info == {
        "model": str(folder), "backend": each.model.backend.name, "drafter": "mtp", "head": "the checkpoint",
        "depth": "auto", "context": 512, "draft_vocab": 131,
    }  # fmt: skip
    assert each.generate(["the"], SamplingParams(max_tokens=5))[0].method == "mtp"


def test_generation_config_sets_the_default_sampling_parameters(tmp_path) -> None:
    folder = write_tiny(FAMILY, tmp_path / "model", num_hidden_layers=2)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 5, "top_k": 50}))
    each = LLM(str(folder), EngineConfig(threads=1, kv_blocks=40, seed=3))
    assert each.default_params == SamplingParams(temperature=5, top_k=50)
    greedy, warm, own = (
        each.generate("the", params)[0].token_ids
        for params in (SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=5, top_k=50), None)
    )
    assert own[:40] == warm != greedy
    assert "".join(delta.text for delta in each.stream("the")) == each.generate("the")[0].text
    file.write_text(json.dumps({"temperature": "warm"}))
    with pytest.raises(ModelError, match=r"generation_config.json of .*temperature is 'warm'"):
        LLM(str(folder), EngineConfig(threads=1, kv_blocks=40))


@pytest.mark.parametrize("settings", [{"drafter": "none"}, {"depth": 0}])
def test_without_drafter_each_pass_emits_one_token(settings: dict[str, Any]) -> None:
    each = llm(**settings)
    done = each.generate(["the"], SamplingParams(max_tokens=6, ignore_eos=True))[0]
    assert (each.method, done.method, each.info["depth"]) == ("none", "none", 0)
    assert (done.speculation.drafts, done.speculation.passes, done.speculation.emitted) == (0, 6, 6)


# Text.


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", MODELS)
def test_drafting_does_not_change_the_text(kind: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=30)
    expected = llm(kind, **PLAIN).generate(PROMPTS, params)
    each = llm(kind, depth=4)
    found = each.generate(PROMPTS, params)
    assert [(c.text, c.token_ids, c.finish_reason) for c in found] == [
        (c.text, c.token_ids, c.finish_reason) for c in expected
    ]
    for completion in found:
        assert completion.text == text_of(each, completion)
        assert completion.usage["completion_tokens"] == len(completion.token_ids) <= 30
        assert completion.usage["prompt_tokens"] == len(completion.prompt_token_ids)
    assert_clean(each.engine)


@pytest.mark.slow
def test_stream_equals_generate() -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=40, logprobs=1, stop=("zz",))
    for kind in MODELS:
        each = llm(kind, depth=4)
        whole = each.generate(["the thing"], params)[0]
        deltas = list(each.stream("the thing", params))
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        last = deltas[-1].completion
        assert last is not None
        assert (last.text, last.finish_reason, last.seed) == (whole.text, whole.finish_reason, 3)
        assert [x.token for x in last.logprobs] == whole.token_ids
        assert last.timing["ttft_s"] > 0
        assert last.timing["decode_s"] > 0
    assert any(len(delta.token_ids) > 1 for delta in deltas), "an accepted draft arrives at once"


@pytest.mark.slow
def test_closed_stream_frees_its_resources() -> None:
    each = llm()
    stream = each.stream("the thing", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert each.engine.has_work
    stream.close()
    assert_clean(each.engine)
    assert not each.shared.inboxes


@pytest.mark.slow
def test_interleaved_streams_keep_their_texts() -> None:
    """Two streams read in turns and a complete answer share one engine."""
    each = llm("agreeing", depth=4)
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=25, ignore_eos=True, stop=("q",)) for i in range(3)]
    alone = [each.generate([prompt], p)[0].text for prompt, p in zip(PROMPTS, params, strict=False)]
    streams = [each.stream(prompt, p) for prompt, p in zip(PROMPTS, params[:2], strict=False)]
    texts = ["", ""]
    texts[0] += next(streams[0]).text
    texts[1] += next(streams[1]).text
    texts[0] += next(streams[0]).text
    between = each.generate([PROMPTS[2]], params[2])[0].text
    for i in (1, 0):
        texts[i] += "".join(delta.text for delta in streams[i])
    assert [*texts, between] == alone
    assert_clean(each.engine)


def test_session_accepts_requests_while_others_run() -> None:
    each, params = llm("agreeing", depth=4), SamplingParams(max_tokens=20, ignore_eos=True)
    alone = [each.generate([prompt], params)[0].text for prompt in PROMPTS[:2]]
    with each.session() as session:
        session.submit(each.request(PROMPTS[0], params))
        choices = {choice.request.request_id: choice for choice, _ in session.step()}
        session.submit(each.request(PROMPTS[1], params))
        while session.running:
            choices |= {choice.request.request_id: choice for choice, _ in session.step()}
        session.submit(each.request(PROMPTS[0], params))  # still running when the session closes
    assert [choice.text for choice in choices.values()] == alone
    assert all(choice.arrivals == sorted(choice.arrivals) for choice in choices.values())
    assert_clean(each.engine)
    assert not each.shared.inboxes


@pytest.mark.slow
def test_completion_is_serializable() -> None:
    first = llm().generate(["the thing"], SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=4))[0]
    document = asdict(first)
    assert json.loads(json.dumps(document["speculation"])) == vars(first.speculation) | {"synthetic": []}
    assert pickle.loads(pickle.dumps(first)) == first
    assert [document["index"], *(each["index"] for each in document["others"])] == [0, 1, 2]


def test_on_finish_may_call_generate() -> None:
    each, seen = llm(), []

    def again(index: int, completion: Completion) -> None:
        seen.append((index, completion.text, each.generate(["x"], SamplingParams(max_tokens=3, seed=1))[0].text))

    found = each.generate(PROMPTS, SamplingParams(max_tokens=8, seed=1), on_finish=again)
    assert sorted(index for index, _, _ in seen) == [0, 1, 2, 3]
    assert {index: text for index, text, _ in seen} == {i: c.text for i, c in enumerate(found)}
    assert len({text for _, _, text in seen}) == 1


def test_results_have_the_order_of_the_prompts() -> None:
    each = llm(max_num_seqs=2)
    lengths = [20, 3, 9, 1]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    finished: list[int] = []
    found = each.generate(PROMPTS, params, on_finish=lambda index, _: finished.append(index))
    assert [len(c.token_ids) for c in found] == lengths
    assert [c.prompt_token_ids for c in found] == [each.encode(prompt) for prompt in PROMPTS]
    assert finished[0] == 1
    assert sorted(finished) == [0, 1, 2, 3]


def test_empty_list_of_prompts() -> None:
    assert llm().generate([]) == []


# Ends.


def free_text(each: LLM, **changes: Any) -> Completion:
    """A long text to take stop strings from."""
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 80, "ignore_eos": True, **changes})
    return each.generate(["the thing"], params)[0]


def printable(text: str) -> str:
    assert len(text) > 40
    return text


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "mtp", "ngram"])
@pytest.mark.parametrize("kind", MODELS)
def test_text_ends_before_the_stop_string(kind: str, drafter: str) -> None:
    """Stop strings are pieces of the text, most of them across tokens."""
    each = llm(kind, drafter=drafter, depth=5)
    whole = printable(free_text(each).text)
    stops = [whole[at : at + size] for at, size in ((3, 1), (9, 2), (20, 3), (31, 5))]
    for stop in stops:
        found = free_text(each, stop=(stop, "never there", stop + "\0"))
        assert found.text == whole[: whole.index(stop)]
        assert found.finish_reason == "stop"
        ids = [each.tokenizer.decode(found.token_ids[:n]) for n in range(len(found.token_ids) + 1)]
        assert stop in ids[-1], "the token that completes the stop string is missing"
        assert stop not in ids[-2]
        streamed = [delta.text for delta in each.stream("the thing", params_with(stop))]
        assert streamed
        assert "".join(streamed) == found.text
    assert_clean(each.engine)


def params_with(stop: str) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=5, max_tokens=80, ignore_eos=True, stop=(stop,))


@pytest.mark.slow
def test_stopped_choice_leaves_the_batch() -> None:
    each = llm("agreeing")
    stop = printable(free_text(each).text)[2:4]
    alive: list[int] = []
    short = SamplingParams(temperature=1.0, seed=5, max_tokens=80, ignore_eos=True, stop=(stop,))
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    each.generate(["the thing", "x"], [short, long], on_finish=lambda *_: alive.append(len(each.engine._live)))
    assert alive == [1, 0]


@pytest.mark.slow
def test_earliest_of_several_stop_strings_ends_the_text() -> None:
    each = llm("agreeing")
    whole = printable(free_text(each).text)
    early, late = whole[12:15], whole[25:28]
    assert free_text(each, stop=(late, early)).text == whole[: min(whole.index(early), whole.index(late))]


def test_text_held_back_for_a_stop_string_is_emitted_at_the_end() -> None:
    """The text ends with the beginning of a stop string."""
    each = llm()
    whole = printable(free_text(each).text)
    found = free_text(each, stop=(whole[-3:] + "and more",))
    assert (found.text, found.finish_reason) == (whole, "length")


@pytest.mark.slow
def test_min_tokens_delays_stop_strings_and_stop_ids() -> None:
    each = llm("agreeing")
    whole = free_text(each)
    text = printable(whole.text)
    stop = text[2:4]
    assert len(free_text(each, stop=(stop,)).token_ids) < 8
    found = free_text(each, stop=(stop,), min_tokens=20)
    assert len(found.token_ids) >= 20
    assert whole.token_ids[: len(found.token_ids)] == found.token_ids
    stop_id = whole.token_ids[3]
    assert free_text(each, stop_token_ids=(stop_id,)).token_ids == whole.token_ids[: whole.token_ids.index(stop_id) + 1]
    ended = free_text(each, stop_token_ids=(stop_id,))
    assert ended.text == each.tokenizer.decode(ended.token_ids[:-1]), "the text contains the stop token"
    late = free_text(each, stop_token_ids=(stop_id,), min_tokens=20)
    assert stop_id not in late.token_ids[:20]
    assert len(late.token_ids) >= 20


def test_stop_string_may_begin_before_min_tokens() -> None:
    each = llm()
    whole = free_text(each)
    texts = [each.tokenizer.decode(whole.token_ids[:n]) for n in range(81)]
    at = next(
        n
        for n in range(10, 70)
        if len(texts[n]) == len(texts[n - 1]) + 1 == len(texts[n + 1]) - 1
        and texts[n + 1][-2:].isascii()
        and texts[n + 1][-2:] not in texts[n]
    )
    stop = texts[at + 1][-2:]  # one character each of token `at` and of the next token
    found = free_text(each, stop=(stop,), min_tokens=at)
    assert found.text == texts[at - 1]
    assert len(found.token_ids) == at + 1
    ignored = free_text(each, stop=(stop,), min_tokens=at + 1)
    assert ignored.text.startswith(texts[at + 1])


def test_eos_token_is_not_in_the_text() -> None:
    each = llm()
    bias = {EOS: 100.0}
    found = each.generate(["the"], SamplingParams(max_tokens=9, logit_bias=bias))[0]
    assert (found.token_ids, found.text, found.finish_reason) == ([EOS], "", "stop")
    found = each.generate(["the"], SamplingParams(max_tokens=9, logit_bias=bias, ignore_eos=True))[0]
    assert (found.token_ids, found.text, found.finish_reason) == ([EOS] * 9, "", "length")
    found = each.generate(["the"], SamplingParams(max_tokens=9, logit_bias=bias, min_tokens=4))[0]
    assert found.token_ids.index(EOS) == 4
    assert found.finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_max_tokens_cuts_the_text(max_tokens: int) -> None:
    each = llm("agreeing", depth=5)
    whole = free_text(each, max_tokens=40)
    found = free_text(each, max_tokens=max_tokens)
    assert (found.token_ids, found.finish_reason) == (whole.token_ids[:max_tokens], "length")


def test_context_length_ends_the_text() -> None:
    each = llm("agreeing", max_model_len=64)
    found = free_text(each, max_tokens=200)
    assert found.finish_reason == "length"
    assert len(found.prompt_token_ids) + len(found.token_ids) == 64


def test_incomplete_character_is_replaced() -> None:
    """Each of the three tokens of a euro sign alone is shown as U+FFFD."""
    each = llm()
    euro = each.tokenizer.encode("€")
    assert len(euro) == 3
    texts = []
    for forced in euro:
        texts.append(each.generate(["the"], SamplingParams(max_tokens=2, logit_bias={forced: 100.0}))[0].text)
    assert set("".join(texts)) == {"\ufffd"}


# Several choices, seeds.


@pytest.mark.slow
def test_choices_differ_and_equal_those_of_plain_decoding() -> None:
    params = SamplingParams(temperature=1.0, seed=9, n=4, max_tokens=20)
    found = llm("agreeing").generate(["the thing", "x"], params)
    expected = llm("agreeing", **PLAIN).generate(["the thing", "x"], params)
    for have, want in zip(found, expected, strict=True):
        assert [c.index for c in have.choices] == [0, 1, 2, 3]
        assert have is have.choices[0]
        assert [c.token_ids for c in have.choices] == [c.token_ids for c in want.choices]
        assert len({tuple(c.token_ids) for c in have.choices}) == 4
    first = llm("agreeing").generate(["the thing"], replace(params, n=1))[0]
    assert first.token_ids == found[0].token_ids


def test_numpy_integers_are_accepted() -> None:
    each = llm()
    numbers: Any = (np.int8(100), np.uint64(3), np.int8(2))
    (done,) = each.generate("the", SamplingParams(max_tokens=numbers[0], seed=numbers[1]), depth=numbers[2])
    (plain,) = each.generate("the", SamplingParams(max_tokens=100, seed=3), depth=2)
    assert json.dumps([done.token_ids, done.seed]) == json.dumps([plain.token_ids, plain.seed])


def test_unset_seed_is_random_and_reported_for_repetition() -> None:
    each = llm()
    params = SamplingParams(temperature=1.0, max_tokens=20)
    drawn = each.generate(["the thing"] * 3, params)
    assert len({c.seed for c in drawn}) == 3
    assert all(0 <= c.seed < 2**53 for c in drawn), "a JSON reader may keep it in a double"
    for completion in drawn:
        again = llm(depth=1).generate(["the thing"], replace(params, seed=completion.seed))[0]
        assert (again.token_ids, again.seed) == (completion.token_ids, completion.seed)


def test_engine_seed_is_the_default_of_requests() -> None:
    each = llm(seed=4)
    assert each.generate(["x"], SamplingParams(max_tokens=1))[0].seed == 4
    assert each.generate(["x"], SamplingParams(max_tokens=1, seed=0))[0].seed == 0


# Logprobs.


def test_logprobs_of_every_token() -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=20, logprobs=4, prompt_logprobs=1, ignore_eos=True)
    found = llm("agreeing", depth=4).generate(["the thing"], params)[0]
    plain = llm("agreeing", **PLAIN).generate(["the thing"], params)[0]
    assert [x.token for x in found.logprobs] == found.token_ids
    assert [x.token for x in found.prompt_logprobs] == found.prompt_token_ids[1:]
    assert all(len(x.top) == 4 and x.logprob <= x.top[0][1] + 1e-6 for x in found.logprobs)
    np.testing.assert_allclose(
        [x.logprob for x in found.logprobs], [x.logprob for x in plain.logprobs], rtol=2e-7, atol=1e-9
    )
    ids = [*found.prompt_token_ids, *found.token_ids]
    whole = llm("agreeing").generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    np.testing.assert_allclose(
        [x.logprob for x in [*found.prompt_logprobs, *found.logprobs]], [x.logprob for x in whole], rtol=2e-7, atol=1e-9
    )


@pytest.mark.slow
def test_logprobs_end_with_the_text() -> None:
    each = llm("agreeing", depth=5)
    whole = free_text(each)
    stop = whole.text[12:15]
    found = free_text(each, stop=(stop,), logprobs=0)
    assert [x.token for x in found.logprobs] == found.token_ids
    assert free_text(each).logprobs == []


# Prompts.


def test_kinds_of_prompts() -> None:
    each = llm()
    messages = [{"role": "user", "content": "the thing"}]
    ids = each.encode("the thing")
    assert ids == each.encode(messages)
    assert each.tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>user\nthe thing<|im_end|>\n<|im_start|>assistant\n"
    )
    assert each.tokenizer.decode(each.encode("the thing", raw=True)) == "the thing"
    params = SamplingParams(max_tokens=8)
    prompts = ["the thing", messages, ids, tuple(ids), np.array(ids), [np.int64(i) for i in ids]]
    found = each.generate(prompts, params)  # type: ignore[arg-type]
    assert len({tuple(c.token_ids) for c in found}) == 1
    assert all(c.prompt_token_ids == ids for c in found)
    raw = each.generate(["the thing"], params, raw=True)[0]
    assert raw.prompt_token_ids == each.encode("the thing", raw=True) != ids


def test_message_with_tool_calls_needs_no_content() -> None:
    """OpenAI's clients send content None in such messages."""
    each = llm()
    call = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]}
    user = {"role": "user", "content": "x"}
    assert each.encode([user, call]) == each.encode([user, call | {"content": None}])


def test_system_message_is_in_the_prompt() -> None:
    each = llm()
    messages = [{"role": "system", "content": "an inner ring"}, {"role": "user", "content": "x"}]
    assert "system\nan inner ring" in each.tokenizer.decode(each.encode(messages))


BAD = {
    "empty text": ([""], {}, UsageError, "the prompt is empty"),
    "no ids": ([[]], {}, UsageError, "the prompt is empty"),
    "a number alone": (7, {}, UsageError, "prompts is int"),
    "ids alone": ([1, 2, 3], {}, UsageError, "a prompt is 1"),
    "bytes": ([b"hello"], {}, UsageError, "a prompt is b'hello'"),
    "an iterator": (iter(["a"]), {}, UsageError, "prompts is list_iterator"),
    "allowed": (["x"], {"allowed_token_ids": [1, VOCAB]}, UsageError, f"allowed_token_ids names token {VOCAB}"),
    "only ends": (["x"], {"allowed_token_ids": [EOS], "min_tokens": 2}, UsageError, "min_tokens cannot be reached"),
    "all ends": (["x"], {"stop_token_ids": range(VOCAB), "min_tokens": 2}, UsageError, "min_tokens cannot be reached"),
    "broken ids": ([[5, 6.5]], {}, UsageError, "neither token ids nor messages"),
    "mixed": ([[{"role": "user", "content": "x"}, 7]], {}, UsageError, "neither token ids nor messages"),
    "unknown id": ([[5, VOCAB]], {}, UsageError, f"outside 0..{VOCAB - 1}"),
    "too long": ([[5] * 256], {}, CapacityError, "256 tokens, but the context holds 256"),
    "bias": (["x"], {"logit_bias": {VOCAB: 1.0}}, UsageError, f"logit_bias names token {VOCAB}"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_prompts_leave_the_engine_usable(case: str) -> None:
    prompts, params, error, message = BAD[case]
    each = llm()
    with pytest.raises(error, match=message):
        each.generate(["fine", *prompts] if isinstance(prompts, list) else prompts, SamplingParams(**params))
    assert_clean(each.engine)
    assert not each.shared.inboxes
    assert each.generate(["fine"], SamplingParams(max_tokens=2, ignore_eos=True))[0].usage["completion_tokens"] == 2


def test_invalid_arguments_name_the_problem() -> None:
    each = llm()
    with pytest.raises(UsageError, match="2 prompts, but 1 sets"):
        each.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(UsageError, match="n is 2, but only one choice can be streamed"):
        next(each.stream("a", SamplingParams(n=2)))
    with pytest.raises(UsageError, match="depth is 17, but the drafter's limit is 16"):
        each.generate(["a"], depth=17)
    with pytest.raises(UsageError, match="depth 'auto' is no number"):
        each.generate(["a"], depth="auto")  # type: ignore[arg-type]
    for call in (each.generate, each.stream):
        with pytest.raises(UsageError, match=r"params is dict.*SamplingParams\(max_tokens"):
            next(iter(call("a", {"max_tokens": 3})))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="params is dict"):
            next(iter(call("a", {})))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"no argument 'max_tokens' .hint: give SamplingParams"):
            next(iter(call("a", max_tokens=3)))  # type: ignore[call-arg]
        with pytest.raises(UsageError, match=r"no argument 'dept' .hint: did you mean depth"):
            next(iter(call("a", dept=3)))  # type: ignore[call-arg]
        with pytest.raises(UsageError, match=r"no argument 'sampling_params' .hint: arguments are params"):
            next(iter(call("a", sampling_params=3)))  # type: ignore[call-arg]
    for wrong, what in (
        ({"role": None}, "no role"), ({"role": 1}, "the role 1"), ({"content": None}, "no content"),
        ({"content": 5}, "the content 5"), ({"content": {"text": "a"}}, "the content {'text': 'a'}"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=f"a message has {what}"):
            each.chat([{"role": "user", "content": "a"} | wrong])
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(UsageError, match="an LLM cannot be copied, pickled"):
            copied(each)
    for wrong, what in (("model", 5), ("config", {}), ("cache_bytes", "1G")):
        with pytest.raises(UsageError, match=f"{wrong} is {what!r}"):
            LLM(**{wrong: what})  # type: ignore[arg-type]
    assert_clean(each.engine)


def test_interface_of_vllm() -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(MODELS["random"](FAMILY), depth=2, max_model_len=256, threads=1, kv_blocks=40) as each:
        assert (each.config.depth, each.engine.max_length) == (2, 256)
        one = each.generate("the thing", params)
        assert one[0].outputs[0].text == one[0].text == each.generate(["the thing"], params)[0].text
        said = [{"role": "user", "content": "the thing"}]
        assert [done.text for done in each.chat([said, said], params)] == [one[0].text] * 2
        assert each.chat(said, params)[0].token_ids == one[0].token_ids
        with pytest.raises(UsageError, match="messages is 'the thing'"):
            each.chat("the thing")
    with pytest.raises(UsageError, match=r"LLM has no option .max_model_length.*did you mean max_model_len"):
        LLM(MODELS["random"](FAMILY), max_model_length=5)
    for options in ({"depth": 99}, {"depth": 2, "max_model_len": 10**6}, {"ngram_min": 4, "ngram_max": 3}):
        with pytest.raises(UsageError, match=f"^{list(options)[-1]} is") as refused:
            LLM(MODELS["random"](FAMILY), **options)
        assert "--" not in str(refused.value)
    with pytest.raises(UsageError, match="attach one with head=DIR, or use the drafter mtp, or depth=0"):
        LLM(MODELS["random"](FAMILY), drafter="medusa")


@pytest.mark.parametrize(("by_keyword", "hints"), [
    (True, ("raise max_model_len if", "load one: lora='NAME=PATH'")),
    (False, ("raise --max-model-len if", "load one: --lora NAME=PATH")),
])  # fmt: skip
def test_hints_name_options_in_the_callers_form(by_keyword: bool, hints: tuple[str, str]) -> None:
    options: dict[str, Any] = {"depth": 2, "max_model_len": 64, "threads": 1, "kv_blocks": 40}
    given = options if by_keyword else {"config": EngineConfig(**options)}
    with LLM(MODELS["random"](FAMILY), **given) as each:
        too_long = [5] * 70
        for call in (each.generate, each.stream):
            with pytest.raises(CapacityError, match=hints[0]):
                next(iter(call([too_long] if call == each.generate else too_long)))
        with pytest.raises(UsageError, match=hints[1]):
            each.generate("the thing", lora="sql")


def test_pydantic_model_or_json_schema_as_constraint() -> None:
    class Point(BaseModel, extra="forbid"):
        x: bool

    each = llm()
    for constraint in (Point, Point.model_json_schema()):
        done = each.generate("the", SamplingParams(max_tokens=200), constraint=constraint)[0]
        assert Point.model_validate_json(done.text)
    with pytest.raises(UsageError, match="constraint is 'json'"):
        each.generate("the", constraint="json")


def test_pydantic_constraint_forbids_additional_properties() -> None:
    class Inner(BaseModel):
        y: bool

    class Outer(BaseModel):
        x: Inner
        counts: dict[str, int] = {}

    class Settings(BaseModel):
        default: Annotated[list[Any], WithJsonSchema({"type": "array", "items": {"type": "object", "properties": {}}})]

    class Open(BaseModel, extra="allow"):
        x: bool

    plain = as_grammar(Outer).plain  # type: ignore[union-attr]
    assert plain["additionalProperties"] is plain["$defs"]["Inner"]["additionalProperties"] is False
    assert plain["properties"]["counts"]["additionalProperties"] == {"type": "integer"}
    assert as_grammar(Open).plain["additionalProperties"] is True  # type: ignore[union-attr]
    schema = as_grammar(Settings).plain  # type: ignore[union-attr]
    assert schema["properties"]["default"]["items"]["additionalProperties"] is False  # a field, not the keyword
    cut = llm().generate("the", SamplingParams(max_tokens=2), constraint=Outer)[0]
    assert (cut.finish_reason, cut.is_truncated) == ("length", True)


def test_close_frees_the_engine() -> None:
    each = LLM(MODELS["random"](FAMILY), depth=0, max_model_len=256, threads=1, kv_blocks=40)
    engine, stream = weakref.ref(each.engine), each.stream("the", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    each.close()
    with pytest.raises(GenerationError, match="the engine was closed"):
        list(stream)
    each.close()
    del stream
    gc.collect()
    assert engine() is None
    for asked in (
        lambda: each.generate("the"), lambda: each.info, lambda: each.method, lambda: each.chat_sampling,
        lambda: each.image_processor, lambda: each.decode_pair("the", SamplingParams(), 0), each.__enter__,
    ):  # fmt: skip
        with pytest.raises(UsageError, match="this LLM is closed"):
            asked()


def test_model_without_chat_template(tmp_path) -> None:
    folder = write_tiny(FAMILY, tmp_path / "model", num_hidden_layers=1)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    each = LLM(str(folder), EngineConfig(threads=1, kv_blocks=40))
    with pytest.raises(UsageError, match="has no chat template"):
        each.encode([{"role": "user", "content": "x"}])
    assert each.tokenizer.decode(each.encode("the thing")) == "the thing"
    each.use_chat_template(ChatTemplate.from_name("vicuna"))
    assert each.turn_end == ("\nUSER:",)
    assert each.tokenizer.decode(each.encode([{"role": "user", "content": "x"}])) == "USER: x\nASSISTANT:"
    ends = each.tokenizer.eos_ids
    each.use_chat_template(ChatTemplate.from_name("chatml"))  # chatml's end of turn is in this vocabulary
    assert each.tokenizer.eos_ids == ends | {each.tokenizer.id_of("<|im_end|>")}


# Constraints.

CLOCK = GrammarSpec("regex", r"[0-9]{1,3}:[0-9]{2} (am|pm)")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "mtp"])
def test_every_choice_satisfies_the_constraint(drafter: str) -> None:
    """The constraint ends the text despite min_tokens and ignore_eos. The text has no end-of-text token."""
    each, plain = llm(drafter=drafter), llm(**PLAIN)
    params = SamplingParams(temperature=1.0, seed=3, n=3, min_tokens=20, ignore_eos=True, stop=("zz",))
    for index, choice in enumerate(each.generate(["when?"], params, constraint=CLOCK)[0].choices):
        assert re.fullmatch(CLOCK.value, choice.text) and choice.finish_reason == "stop"
        assert choice.token_ids == plain.generate(["when?"], params, constraint=CLOCK)[0].choices[index].token_ids
    deltas = list(each.stream("when?", SamplingParams(seed=1, ignore_eos=True), constraint=CLOCK))
    assert re.fullmatch(CLOCK.value, "".join(delta.text for delta in deltas))


def test_invalid_constraint_leaves_no_request() -> None:
    each = llm()
    with pytest.raises(UsageError, match="regex constraint is not valid"):
        each.generate(["a", "b"], constraint=GrammarSpec("regex", "(a"))
    assert_clean(each.engine)
    assert not each.shared.inboxes


@pytest.mark.slow
def test_program_exits_while_daemon_threads_generate(tmp_path) -> None:
    code = f"""
import threading
from headstart.api import LLM
from headstart.core import SamplingParams
llm, runs = LLM({str(write_tiny("qwen3", tmp_path / "m"))!r}, backend="native"), threading.Event()
def generate():
    while True:
        for piece in llm.stream("the", SamplingParams(ignore_eos=True)):
            runs.set()
for _ in range(2):
    threading.Thread(target=generate, daemon=True).start()
runs.wait()
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_grammar_library_is_imported_lazily() -> None:
    code = """
import sys
import headstart.api
from headstart.text.grammar_spec import GrammarSpec
GrammarSpec("regex", "a")
print("llguidance" in sys.modules)
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


# Cache and counts.


def test_cached_tokens_and_speculation_counts() -> None:
    each = llm("agreeing", depth=4)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    first = each.generate(["an answer about the inner ring"], params)[0]
    second = each.generate(["an answer about the inner ring"], params)[0]
    assert first.usage["cached_tokens"] == 0
    assert second.usage["cached_tokens"] == (len(first.prompt_token_ids) - 1) // 8 * 8 > 0
    assert second.token_ids == first.token_ids
    stats = first.speculation
    assert stats.emitted == 30 == stats.passes + stats.accepted
    assert stats.acceptance_length == pytest.approx(1 + stats.accepted / stats.drafts)
    assert stats.accepted == sum(stats.per_position) > 0
    none = each.generate(["an answer about the inner ring"], params, depth=0)[0]
    assert (none.speculation.drafts, none.token_ids) == (0, first.token_ids)
