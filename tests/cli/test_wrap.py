"""Word wrapping of streamed text."""

import pytest
from hypothesis import given, strategies as st

from headstart.cli.generate import WordWrap

CODE = "```python\nprint('a line of code is as long as it is')\n```"


def wrap_text(text: str, width: int, size: int = 1) -> str:
    wrap = WordWrap(lambda: width)
    return "".join(wrap.push(text[at : at + size]) for at in range(0, len(text), size)) + wrap.flush()


@pytest.mark.parametrize(("text", "shown"), [
    ("The sky is blue because of scattering.", "The sky is blue\nbecause of\nscattering."),
    ("exactly16letters and", "exactly16letters\nand"),
    ("- one two three four\n  - deeper", "- one two three\nfour\n  - deeper"),
    ("https://example.org/a/long/address ends", "https://example.org/a/long/address ends"),
    (f"Look:\n{CODE}\nand so on, as before", f"Look:\n{CODE}\nand so on, as\nbefore"),
    ("天空是蓝色的因为瑞利散射", "天空是蓝色的因为\n瑞利散射"),
    ("one\ttwo three four", "one\ttwo\nthree four"), ("", ""),
])  # fmt: skip
def test_lines_wrap_between_words(text: str, shown: str) -> None:
    assert wrap_text(text, 16) == shown


@given(st.text("ab \n`天\u0301", max_size=80), st.integers(4, 12), st.integers(1, 7))
def test_wrapping_is_independent_of_pieces_and_keeps_the_text(text: str, width: int, size: int) -> None:
    shown = wrap_text(text, width, size)
    assert shown == wrap_text(text, width)
    assert shown.split() == text.split() or "天" in text
    assert "".join(shown.split()) == "".join(text.split())


def test_words_are_emitted_when_complete() -> None:
    wrap = WordWrap(lambda: 80)
    assert [wrap.push(piece) for piece in ("The", " sky", " is", ".")] == ["", "The", " sky", ""]
    assert wrap.flush() == " is."
