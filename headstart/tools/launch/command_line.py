"""Shell command lines whose arguments can be renamed, removed or merged while the rest of the text stays unchanged."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headstart.errors import UsageError
from headstart.tools.launch.arguments import SWITCHES, ArgumentTable

Edit = tuple[int, int, str]  # text[begin:end] is replaced by the string


@dataclass
class ArgumentWord:
    """A flag with its value, or a positional word, of a CommandLine."""

    flag: str = ""  # as written, with dashes; empty for a positional word
    value: str | None = None
    joined: bool = False  # written as --flag=value
    name: str = ""  # the flag's first name (ArgumentTable)
    tokens: Sequence[ShellToken] = ()  # its tokens in the text; empty for a word that was added
    written: tuple[str, str | None] = ("", None)  # flag and value of the original text

    def text(self) -> list[str]:
        """Returns the one or two unquoted words of the argument."""
        if not self.flag:
            return [str(self.value)]
        if self.value is None:
            return [self.flag]
        return [f"{self.flag}={self.value}"] if self.joined else [self.flag, self.value]

    def shown(self) -> str:
        """Returns the argument quoted for the shell."""
        if self.value is None:
            return self.flag
        is_closed = "$" in (self.written[1] or "") and all(token.plain for token in self.tokens)  # '{"model": "$X"}'
        value = quoted(self.value, expands=not is_closed)
        return f"{self.flag}={value}" if self.joined else " ".join(part for part in (self.flag, value) if part)

    def edits(self) -> list[Edit]:
        (flag, value), first, last = self.written, self.tokens[0], self.tokens[-1]
        if (flag, value) == (self.flag, self.value):
            return []
        if value == self.value:  # the value keeps its quotes
            return [(first.begin, first.begin + len(flag), self.flag)]
        return [(first.begin, last.end, self.shown())]


@dataclass
class CommandLine:
    """One command within a text. Its methods change `words`; `edits` returns the resulting changes of the text."""

    text: str
    prefix: Sequence[ShellToken] = ()  # tokens up to the program: variable assignments, a container's flags
    words: list[ArgumentWord] = field(default_factory=list)  # arguments of the program
    changes: list[str] = field(default_factory=list)  # one line for each change, shown to the user
    warnings: list[str] = field(default_factory=list)  # decisions that are left to the user
    removed: list[ArgumentWord] = field(default_factory=list)  # words of the original text
    edited: list[Edit] = field(default_factory=list)  # edits of the prefix

    @classmethod
    def parse(
        cls, text: str, tokens: Sequence[ShellToken], begin: int, table: ArgumentTable | None, *, has_model: bool
    ) -> CommandLine:
        """Parses the tokens of one command. `begin` is the index of the program's token. `has_model`: the first word
        without dashes is the model."""
        line, rest = cls(text, tokens[: begin + 1]), list(tokens[begin + 1 :])
        while rest:
            token = rest.pop(0)
            flag, equals, value = token.value.partition("=")
            mended = _mended(flag, table) if not has_model or line.words or flag.startswith("-") else flag
            if not mended.startswith("-") or re.fullmatch(r"-[\d.]*", mended):
                line.words.append(ArgumentWord(value=token.value, tokens=(token,), written=("", token.value)))
                continue
            found = table.find(mended) if table else ()
            name = found[0] if len(found) == 1 else mended
            word = ArgumentWord(flag=mended, joined=bool(equals), name=name, tokens=(token,))
            if equals:
                word.value = value
            elif rest and _takes_value(table, name, rest[0].value) and not re.match(r"-[-A-Za-z]", rest[0].value):
                word.value, word.tokens = rest[0].value, (token, rest.pop(0))
            word.written = (flag, word.value)
            if mended != flag:
                line.changes.append(f"{flag} -> {mended}")
            line.words.append(word)
        return line

    def find(self, *flags: str) -> ArgumentWord | None:
        """Returns the first word that is one of these flags, in any spelling; None if there is none."""
        return next((word for word in self.words if word.flag and {word.flag, word.name} & set(flags)), None)

    def take(self, *flags: str) -> ArgumentWord | None:
        """Removes and returns the word that `find` returns."""
        word = self.find(*flags)
        if word:
            self.remove(word)
        return word

    def remove(self, word: ArgumentWord) -> None:
        self.words.remove(word)
        if word.tokens:
            self.removed.append(word)

    def put(self, flag: str, value: str | None = None) -> None:
        self.words.append(ArgumentWord(flag, value, name=flag))

    def rename(self, old: str, new: str) -> None:
        for word in self.words:
            if word.flag == old:
                word.flag = word.name = new
                self.changes.append(f"{old} -> {new}")

    def rename_value(self, flag: str, names: Mapping[str, str]) -> None:
        word = self.find(flag)
        old = next((name for name in names if word and (word.value or "") in (name, name.lower())), None)
        if word and old:
            word.value = names[old]
            self.changes.append(f"{flag} {old} -> {names[old]}")

    def drop_boolean_values(self, table: ArgumentTable) -> None:
        """Replaces `--switch True` by `--switch`, and `--switch False` by `--no-switch` or nothing."""
        for word in list(self.words):
            kind = table.kinds.get(word.name)
            value = (word.value or "").lower()
            if kind not in ("switch", "boolean") or value not in ("true", "false"):
                continue
            before = " ".join(word.text())
            if value == "true" or kind == "boolean":
                word.flag = word.flag if value == "true" else f"--no-{word.name[2:]}"
                word.value, word.joined = None, False
            else:
                self.remove(word)
            self.changes.append(f"{before} -> {word.flag if word in self.words else 'nothing: it is off anyway'}")

    def drop(self, flag: str, why: str, *, switch: bool = False) -> None:
        """Removes a flag with its value. `switch`: the flag takes no value, so the word after it stays."""
        while word := next((each for each in self.words if each.flag == flag), None):
            place = self.words.index(word)
            if switch and word.value is not None and not word.joined:
                kept = ArgumentWord(value=word.value, tokens=(word.tokens[1],), written=("", word.value))
                self.words.insert(place + 1, kept)
                word.value, word.tokens = None, word.tokens[:1]
            self.remove(word)
            self.changes.append(f"{' '.join(word.text())} removed: {why}")

    def drop_variable(self, name: str, why: str) -> None:
        """Removes the assignment NAME=VALUE of an environment variable before the program."""
        for token in self.prefix:
            if token.value.startswith(f"{name}="):
                self.edited.append((*_with_blank(self.text, token.begin, token.end), ""))
                self.changes.append(f"{name} removed: {why}")

    def edits(self) -> list[Edit]:
        """Returns all edits of the text. Added words replace the first removed word; without one they go to the end."""
        edits = [*self.edited, *(edit for word in self.words if word.tokens for edit in word.edits())]
        new = " ".join(word.shown() for word in self.words if not word.tokens)
        places = sorted((word.tokens[0].begin, word.tokens[-1].end) for word in self.removed)
        for index, (begin, end) in enumerate(places):
            is_replaced = new and not index
            edits.append((begin, end, new) if is_replaced else (*_with_blank(self.text, begin, end), ""))
        if new and not places:
            last = max((word.tokens[-1].end for word in self.words if word.tokens), default=self.prefix[-1].end)
            edits.append((last, last, f" {new}"))
        return edits


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    for begin, end, replacement in sorted(edits, reverse=True):
        text = text[:begin] + replacement + text[end:]
    return text


def _with_blank(text: str, begin: int, end: int) -> tuple[int, int]:
    """Extends a word's range over the blanks or line continuation before it, else over the blanks after it."""
    before = re.search(r"(?:[ \t]|\\\r?\n)+$", text[:begin])
    if before and before.start() and text[before.start() - 1] != "\n":
        return before.start(), end
    after = re.match(r"[ \t]+", text[end:])
    return begin, end + (after.end() if after else 0)


def _takes_value(table: ArgumentTable | None, name: str, value: str) -> bool:
    """Returns whether `value`, the word after a flag, is its value. Old versions also allowed `--switch True`."""
    if table is None or name not in table.kinds:
        return True
    return table.kinds[name] not in SWITCHES or value.lower() in ("true", "false")


def _mended(flag: str, table: ArgumentTable | None) -> str:
    """Returns the flag with dashes that it lost on a web page, and with - or _ as the engine spells it; returns
    `flag` unchanged if no flag of the table matches."""
    if table is None or (flag.startswith("-") and table.find(flag.partition(".")[0])):
        return flag
    bare = flag.lstrip("-")
    is_short = flag.startswith("-") and not flag.startswith("--") and not re.search("[-_]", bare)
    if is_short or not re.fullmatch(r"[a-z][\w.-]+", bare):
        return flag
    spelled = [f"--{bare}"] if flag != f"--{bare}" else []
    spelled += [f"--{bare.replace('_', '-')}"] if flag.startswith("--") else []
    spelled += [f"--{bare.replace('-', '_')}"] if flag.startswith("-") else []
    exact = table.kinds.keys() | table.aliases.keys()
    return next((each for each in spelled if each in exact or table.kinds.get(each.replace("--no-", "--"))), flag)


SKIPPED = re.compile(r"(?:[ \t]|\\\r?\n)+|#[^\n]*")
OPERATOR = re.compile(r"&>>?|\|&|&&|\|\||;;|[;&|\n(){}](?![\w$])|[;&|\n()]")
REDIRECTION = re.compile(r"\d*(?:<<-?|<<<|>>|>&|<&|<>|>\||>|<)|&>>?")
NESTED = {"$((": "))", "$(": ")", "${": "}", "'": "'", '"': '"', "`": "`"}
"""Opening -> closing mark of a quote or expansion, which the shell reads as part of one word."""
RESERVED = {"do", "then", "else", "if", "while", "until", "!", "time", "{"}  # words after which a command begins


@dataclass(frozen=True)
class ShellToken:
    """A word of a shell text: text[begin:end]."""

    begin: int
    end: int
    value: str  # without quotes
    plain: bool = True  # has no expansion ($, `, globs, ~)


def commands(text: str) -> Iterator[list[ShellToken]]:
    """Yields the words of each shell command in a text, without redirections. Raises UsageError for an open quote."""
    place, redirection, ended = 0, "", text + "\n"
    words: list[ShellToken] = []
    heredocs: list[str] = []
    while place < len(ended):
        if match := SKIPPED.match(ended, place):
            place = match.end()
        elif ended.startswith("((", place):
            place = _end_of(ended, place + 2, "))")
        elif match := REDIRECTION.match(ended, place):
            place, redirection = match.end(), match[0].lstrip("0123456789")
        elif match := OPERATOR.match(ended, place):
            place, redirection = match.end(), ""
            if words:
                yield words
            words = []
            while match[0] == "\n" and heredocs:
                mark = re.compile(rf"^\t*{re.escape(heredocs.pop(0))}$", re.MULTILINE).search(ended, place)
                place = mark.end() if mark else len(ended)
        else:
            token = _word(ended, place)
            place = token.end
            if redirection in ("<<", "<<-"):
                heredocs.append(token.value)
            elif not redirection and (words or token.value not in RESERVED):
                words.append(token)
            redirection = ""


def _word(text: str, begin: int) -> ShellToken:
    """Reads the shell word that starts at `begin`."""
    place, value, plain = begin, "", True
    while place < len(text) and (one := text[place]) not in " \t\n;&|<>()":
        if one == "\\" and place + 1 < len(text):
            value += text[place + 1].strip("\n")
            place += 2
        elif opening := next((each for each in NESTED if text.startswith(each, place)), ""):
            end = _end_of(text, place + len(opening), NESTED[opening])
            inner = text[place + 1 : end - 1]
            if one == "$":
                value, plain = value + text[place:end], False
            else:
                value += inner if one == "'" else re.sub(r'\\([$`"\\\n])', r"\1", inner)
                plain = plain and (one == "'" or not re.search(r"(?<!\\)[$`]", inner))
            place = end
        else:
            plain = plain and one not in "$*?~"
            value, place = value + one, place + 1
    return ShellToken(begin, max(place, begin + 1), value, plain)


def _end_of(text: str, place: int, closing: str) -> int:
    """Returns the index after the `closing` mark of the quote or expansion whose content starts at `place`. Raises
    UsageError if the mark is missing."""
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
    raise UsageError(f"--translate: {text[:60].strip()!r} ends before {closing}", hint)


def quoted(value: str, *, expands: bool = True) -> str:
    """Quotes a word for the shell. A leading ~/ stays active. With `expands`, $ and ` stay active too."""
    if expands and ("$" in value or "`" in value):
        escaped = value.replace('"', '\\"')
        return f'"{escaped}"' if re.search(r"[\s'\"{}();&|<>*?]", re.sub(r"\$\{\w+\}", "", value)) else value
    if value.startswith("~/") and not re.search(r"[^\w./~-]", value):
        return value
    return shlex.quote(value)


PASTED = str.maketrans(
    "\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb\u00a0\u202f", 3 * "'" + 5 * '"' + 2 * " ", "\u200b\ufeff"
)
"""Quotes and spaces of web pages and word processors."""
DASHES = re.compile(r"(?<![^\s\\])[\u2010-\u2015\u2212]+-?(?=[A-Za-z])")


def plain_typography(text: str) -> str:
    """Replaces typographic quotes, spaces and dashes by ASCII ones. A backslash between blanks was a line
    continuation and becomes one again."""
    text = DASHES.sub("--", text.translate(PASTED))
    text = re.sub(r"[ \t]+\\[ \t]*#[^\n]*\n", " \\\\\n", text)
    return re.sub(r"[ \t]+\\[ \t]+(?=\S)", " \\\\\n  ", text)
