"""Incremental detokenization and stop strings: joined pieces equal the whole text."""

from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given, settings, strategies as st
from toy_tokenizers import byte_level, sentencepiece

from headstart.text.detokenizer import Detokenizer, StopChecker
from headstart.text.tokenizer import Tokenizer

KINDS = ("byte_level", "sentencepiece")
IDS = st.lists(st.integers(0, 290), max_size=30)
STOPS = st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=3)
PIECES = st.lists(st.text(alphabet="ab<c", max_size=5), max_size=12)


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level() if kind == "byte_level" else sentencepiece())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(ids=IDS)
@settings(deadline=None, max_examples=200)
def test_joined_pieces_equal_the_decoded_text(kind: str, skip: bool, ids: list[int]) -> None:
    stream = Detokenizer(tokenizer(kind), skip_special=skip)
    pieces = [stream.push(token) for token in ids]
    whole = "".join(pieces) + stream.flush()
    assert whole == tokenizer(kind).decode(ids, skip)
    assert all(whole.startswith(text) for text in accumulate(pieces, initial=""))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=20))
@settings(deadline=None, max_examples=200)
def test_pieces_have_no_partial_characters(kind: str, text: str) -> None:
    stream = Detokenizer(tokenizer(kind))
    pieces = [stream.push(token) for token in tokenizer(kind).encode(text, parse_special=False)]
    assert "".join(pieces) == text and stream.flush() == ""
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_incomplete_character_is_replaced_at_the_end() -> None:
    stream = Detokenizer(tokenizer("byte_level"))
    ids = tokenizer("byte_level").encode("🎉")
    assert [stream.push(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.flush() == "\ufffd" and stream.flush() == ""


def test_continued_text_keeps_its_leading_space() -> None:
    ids = tokenizer("sentencepiece").encode("hello")
    assert Detokenizer(tokenizer("sentencepiece")).push(ids[0]) == "hello"
    assert Detokenizer(tokenizer("sentencepiece"), continues=True).push(ids[0]) == " hello"


def cut(text: str, stops: list[str]) -> str:
    """Reference: reads until a stop string is complete and drops the longest one that ends there."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


@pytest.mark.slow
@given(pieces=PIECES, stops=STOPS)
@settings(deadline=None, max_examples=500)
def test_stop_strings_cut_independently_of_pieces(pieces: list[str], stops: list[str]) -> None:
    checker, shown, stopped = StopChecker(tuple(stops)), "", False
    for piece in pieces:
        text, stopped = checker.push(piece)
        shown += text
        if stopped:
            break
    shown += checker.flush()
    whole = "".join(pieces)
    assert shown == cut(whole, stops)
    assert stopped == any(stop in whole for stop in stops)
    if stopped:
        assert checker.push("more") == ("", True) and checker.flush() == ""


def test_only_possible_beginnings_of_stop_strings_are_held_back() -> None:
    checker = StopChecker(("</end>", "\n\n"))
    assert checker.push("a < b") == ("a < b", False)
    assert checker.push("x</e") == ("x", False)
    assert checker.push("x\n") == ("</ex", False)
    assert checker.push("\nrest") == ("", True)


def test_first_completed_stop_string_ends_the_text() -> None:
    for pieces in (["abcd"], list("abcd"), ["ab", "cd"]):
        checker = StopChecker(("abcd", "bc"))
        assert "".join(checker.push(piece)[0] for piece in pieces) == "a"


def test_stop_string_completed_before_may_stop_is_ignored() -> None:
    checker = StopChecker(["abcd", "bc"])
    assert checker.push("xabc", may_stop=False) == ("x", False)
    assert checker.push("x") == ("abcx", False)  # bc was complete before stopping was allowed
    assert checker.push("a", may_stop=False) == ("", False)
    assert checker.push("bc") == ("a", True)  # begun before, completed now
