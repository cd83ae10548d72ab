"""SamplingParams: types, ranges, lists, bad_words, allowed_token_ids, recommended values."""

import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mypy import api as mypy
from support import SMALL, agreeing_model

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.errors import UsageError
from headstart.params import recommended

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a text for a number": ({"temperature": "0.5"}, "temperature is '0.5', but must be a number"),
    "None for a number": ({"top_p": None}, "top_p is None, but must be a number"),
    "True for a number": ({"min_p": True}, "min_p is True, but must be a number"),
    "a fraction of a token": ({"max_tokens": 1.5}, "max_tokens is 1.5, but must be a whole number"),
    "a float of choices": ({"n": 2.0}, "n is 2.0, but must be a whole number"),
    "a float of candidates": ({"top_k": 1.0}, "top_k is 1.0, but must be a whole number"),
    "a text for a seed": ({"seed": "7"}, "seed is '7', but must be a whole number"),
    "a seed below 0": ({"seed": -1}, "seed is -1, but must be between 0 and 18446744073709551615"),
    "True for logprobs": ({"logprobs": True}, "logprobs is True, but must be a whole number"),
    "not a number": ({"temperature": float("nan")}, "temperature is nan, but must be between 0 and 1e.18"),
    "a penalty of 0": ({"repetition_penalty": 0}, "repetition_penalty is 0, but must be between 0.001"),
    "a penalty below the minimum": ({"repetition_penalty": 1e-50}, "repetition_penalty is 1e-50, but must be between"),
    "a penalty above the maximum": ({"repetition_penalty": 1e50}, "must be between 0.001 and 1000"),
    "ids as stops": ({"stop": [1]}, "stop holds 1, but must be a text or a list of texts"),
    "a stop that is bytes": ({"stop": b"x"}, "stop is b'x', but must be a text or a list of texts"),
    "an empty bad word": ({"bad_words": ["a", ""]}, "bad_words has an empty text"),
    "ids that are texts": ({"stop_token_ids": ["a"]}, "stop_token_ids holds 'a', but must be a list of token ids"),
    "one id": ({"allowed_token_ids": 5}, "allowed_token_ids is 5, but must be a list of token ids"),
    "nothing allowed": ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    "a list of biases": ({"logit_bias": [1, 2]}, "logit_bias is .1, 2., but must be a mapping"),
    "a bias of a text": ({"logit_bias": {"a": 1.0}}, "logit_bias has the key 'a', but keys are token ids"),
    "a bias that is a text": ({"logit_bias": {1: "1"}}, "logit_bias of token 1 is '1', but must be a number"),
    "a flag that is a text": ({"ignore_eos": "yes"}, "ignore_eos is 'yes', but must be true or false"),
    "min_tokens above max_tokens": ({"max_tokens": 3, "min_tokens": 4}, "min_tokens is 4, but"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_values_name_the_parameter(case: str) -> None:
    values, message = WRONG[case]
    with pytest.raises(UsageError, match=message) as refused:
        SamplingParams(**values)
    copied = pickle.loads(pickle.dumps(refused.value))  # as a process pool returns it
    assert (type(copied), str(copied), vars(copied)) == (type(refused.value), str(refused.value), vars(refused.value))


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.none(), st.floats()), max_size=3),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=2)), st.one_of(st.floats(), st.none()), max_size=2),
)  # fmt: skip


@settings(max_examples=120)
@given(st.sampled_from(list(SamplingParams.__dataclass_fields__)), ANYTHING)
def test_any_value_is_accepted_or_refused_by_name(name: str, value: Any) -> None:
    try:
        made = SamplingParams(**{"max_tokens": 10**9, name: value})
    except UsageError as error:
        assert name in str(error) or "stop string" in str(error) or "bad word" in str(error)
    else:
        assert replace(made) == made


def test_numpy_numbers_and_single_texts_are_converted() -> None:
    made = SamplingParams(
        temperature=np.float32(0.5), max_tokens=np.int64(5), stop="ab", bad_words="c", stop_token_ids=np.arange(2)
    )  # type: ignore[call-overload, unused-ignore]
    assert (made.stop, made.bad_words, list(made.stop_token_ids)) == (("ab",), ("c",), [0, 1])
    assert type(made.max_tokens) is int


@pytest.mark.slow
def test_type_checker_accepts_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mypy checks a user's code with the settings and the cache of `make lint`."""
    monkeypatch.chdir(Path(__file__).parents[1])
    file = tmp_path / "user.py"
    file.write_text(
        "from headstart.core import SamplingParams\n"
        'SamplingParams(stop=["a", "b"], stop_token_ids=[1], bad_words=["x"], allowed_token_ids=[1, 2], top_p=1)\n'
        'SamplingParams(stop="a")\n'
        'SamplingParams(max_tokens="5")\n'
    )
    said, _, code = mypy.run([str(file)])
    assert code == 1
    assert said.count("error:") == 1, said
    assert "user.py:4" in said


def llm(**changes: Any) -> LLM:
    return LLM(agreeing_model("mimo"), EngineConfig(**{**SMALL, "dtype": "float64", "max_model_len": 256, **changes}))


PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=60, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "mtp", "ngram"])
def test_only_allowed_token_ids_are_generated(drafter: str) -> None:
    allowed = [5, 9, 40, 77]
    plain = llm(drafter="none", max_num_seqs=1)
    params = replace(PARAMS, allowed_token_ids=allowed)
    [done], [free] = (llm(drafter=drafter, depth=3).generate(["the thing"], each) for each in (params, PARAMS))
    assert set(done.token_ids) <= set(allowed)
    assert len(set(done.token_ids)) > 1
    assert done.token_ids == plain.generate(["the thing"], params)[0].token_ids
    assert free.token_ids == plain.generate(["the thing"], PARAMS)[0].token_ids
    with pytest.raises(UsageError, match="allowed_token_ids is empty"):
        replace(PARAMS, allowed_token_ids=[])


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "mtp", "ngram"])
def test_bad_words_are_not_generated(drafter: str) -> None:
    """Bad words of one and of two tokens are excluded from the output."""
    each = llm(drafter=drafter, depth=3)
    prompt = each.encode("the thing")
    tokens = each.generate([prompt], PARAMS)[0].token_ids
    texts = [each.tokenizer.decode([token]) for token in tokens]
    single = next(text for text in texts if text.strip() and len(each.tokenizer.encode(text)) == 1)
    pair = next(a + b for a, b in pairwise(texts) if len(each.tokenizer.encode(a + b)) == 2 and single not in a + b)
    params = replace(PARAMS, bad_words=[single, pair])
    done = each.generate([prompt], params)[0]
    banned = [tuple(each.tokenizer.encode(word)) for word in (single, pair)]
    for word in banned:
        found = [i for i in range(len(done.token_ids)) if tuple(done.token_ids[i : i + len(word)]) == word]
        assert not found
    assert done.token_ids != tokens
    assert {*banned[1]} & {*done.token_ids}, "tokens of a bad word are banned one by one"
    assert done.token_ids == llm(drafter="none", max_num_seqs=1).generate([prompt], params)[0].token_ids


@pytest.mark.parametrize(("said", "meant"), [
    ({}, {}), ({"eos_token_id": 2, "max_new_tokens": 20}, {}),
    ({"temperature": 0.6, "top_p": 0.95, "top_k": None}, {"temperature": 0.6, "top_p": 0.95}),
    ({"do_sample": True}, {"temperature": 1.0}), ({"top_k": 20}, {"temperature": 1.0, "top_k": 20}),
    ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
    ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
    ({"do_sample": False, "repetition_penalty": 1.05}, {"temperature": 0.0, "repetition_penalty": 1.05}),
])  # fmt: skip
def test_recommended_parameters_from_generation_config(said: dict[str, Any], meant: dict[str, Any]) -> None:
    assert recommended(said) == meant


@pytest.mark.slow
@pytest.mark.parametrize("said", [{"temperature": -1}, {"top_p": "0.9"}, {"top_k": 1.5}, {"repetition_penalty": [1]}])
def test_invalid_recommended_values_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(said))):
        recommended(said)
