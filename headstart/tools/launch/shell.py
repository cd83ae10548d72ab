"""Shell text taken apart into words with their places, so that single ones can be changed and the rest stays as it is.

Only what bounds a word is understood: quotes, expansions, operators, redirections, comments, here-documents. Nothing is
expanded: a word with `$NAME` in it keeps it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from headstart.errors import UsageError

BLANK = re.compile(r"(?:[ \t]|\\\r?\n)+")
OPERATOR = re.compile(r"&>>?|\|&|&&|\|\||;;|[;&|\n(){}](?![\w$])|[;&|\n()]")
REDIRECTION = re.compile(r"\d*(?:<<-?|<<<|>>|>&|<&|<>|>\||>|<)|&>>?")
CLOSING = {"'": "'", '"': '"', "`": "`"}
NESTED = {"$((": "))", "$(": ")", "${": "}"}
RESERVED = {"do", "then", "else", "if", "while", "until", "!", "time", "{"}
"""Words after which a command begins."""


@dataclass(frozen=True)
class Token:
    """A word: its place in the text, and what it is without quotes. `plain`: the shell puts nothing in its place."""

    begin: int
    end: int
    value: str
    plain: bool = True


def commands(text: str) -> Iterator[list[Token]]:
    """The words of each command; redirections and their files are left out. Raises UsageError for a quote without its
    end."""
    reader = _Reader(text)
    while reader.place < len(text):
        if reader.skip():
            continue
        if operator := OPERATOR.match(text, reader.place):
            yield from reader.end(operator[0])
        else:
            reader.word()
    yield from reader.end("")


class _Reader:
    """A place in the text, and the command that is being read. `heredocs`: words that end here-documents to come."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0
        self.found: list[Token] = []
        self.redirection = ""  # whose file comes next
        self.heredocs: list[str] = []

    def skip(self) -> bool:
        """Past what is no word and ends no command; False: nothing of that is here."""
        text, place = self.text, self.place
        if blank := BLANK.match(text, place):
            self.place = blank.end()
        elif text[place] == "#":
            self.place = (text + "\n").index("\n", place)
        elif text.startswith("((", place):
            self.place = _end_of(text, place + 2, "))")
        elif redirection := REDIRECTION.match(text, place):
            self.place, self.redirection = redirection.end(), redirection[0].lstrip("0123456789")
        else:
            return False
        return True

    def word(self) -> None:
        token = _word(self.text, self.place)
        self.place = token.end
        if self.redirection in ("<<", "<<-"):
            self.heredocs.append(token.value)
        elif not self.redirection and (self.found or token.value not in RESERVED):
            self.found.append(token)
        self.redirection = ""

    def end(self, operator: str) -> Iterator[list[Token]]:
        self.place += len(operator)
        if self.found:
            yield self.found
        self.found, self.redirection = [], ""
        if operator == "\n":
            for mark in self.heredocs:
                end = re.compile(rf"^\t*{re.escape(mark)}$", re.MULTILINE).search(self.text, self.place)
                self.place = end.end() if end else len(self.text)
            self.heredocs = []


def _word(text: str, begin: int) -> Token:
    place, value, plain = begin, "", True
    while place < len(text):
        one = text[place]
        nested = next((mark for mark in NESTED if text.startswith(mark, place)), None)
        if nested:
            end = _end_of(text, place + len(nested), NESTED[nested])
            value, place, plain = value + text[place:end], end, False
        elif one == "\\" and place + 1 < len(text):
            value += "" if text[place + 1] == "\n" else text[place + 1]
            place += 2
        elif one in CLOSING:
            end = _end_of(text, place + 1, one)
            inner = text[place + 1 : end - 1]
            value += inner if one == "'" else re.sub(r'\\([$`"\\\n])', r"\1", inner)
            plain = plain and (one == "'" or not re.search(r"(?<!\\)[$`]", inner))
            place = end
        elif one in " \t\n;&|<>()":
            break
        else:
            plain = plain and one not in "$*?~"
            value, place = value + one, place + 1
    return Token(begin, max(place, begin + 1), value, plain)


def _end_of(text: str, place: int, closing: str) -> int:
    """The place after the end of what began before `place`. Raises UsageError where it has none."""
    depth = 0
    while place < len(text):
        if text.startswith(closing, place) and not depth:
            return place + len(closing)
        if text[place] == "\\" and closing != "'":
            place += 1
        elif closing in (")", "))") and text[place] in "()":
            depth += 1 if text[place] == "(" else -1
        place += 1
    hint = "put the whole command line in quotes, in full"
    raise UsageError(f"--translate: {text[:60]!r} ends before {closing}", hint)


def quoted(value: str, *, expands: bool = True) -> str:
    """A word for the shell. What has an expansion in it stays open to the shell, in double quotes where it has blanks,
    unless it was closed before (`expands` False). A leading ~ stays."""
    if expands and ("$" in value or "`" in value):
        escaped = value.replace('"', '\\"')
        return f'"{escaped}"' if re.search(r"[\s'\"{}();&|<>*?]", re.sub(r"\$\{\w+\}", "", value)) else value
    if value.startswith("~/") and not re.search(r"[^\w./~-]", value):
        return value
    return shlex.quote(value)


PASTED = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201a", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"')
    | dict.fromkeys("\u00a0\u202f", " ")
    | dict.fromkeys("\u200b\ufeff", "")
)
"""What web pages and word processors make of quotes and spaces."""
DASHES = re.compile(r"(?<![^\s\\])[\u2010-\u2015\u2212]+-?(?=[A-Za-z])")


def unpasted(text: str) -> str:
    """With the quotes, spaces and dashes that a shell knows. A backslash between blanks once stood at a line's end, and
    one before a comment joins no lines."""
    text = DASHES.sub("--", text.translate(PASTED))
    text = re.sub(r"[ \t]+\\[ \t]*#[^\n]*\n", " \\\\\n", text)
    return re.sub(r"[ \t]+\\[ \t]+(?=\S)", " \\\\\n  ", text)
