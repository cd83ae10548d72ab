"""A command line whose arguments can be renamed, dropped or folded into others, while its text stays as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.tools.launch.definitions import Definitions
from headstart.tools.launch.shell import Token, quoted

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
Edit = tuple[int, int, str]
"""Begin, end, and what stands there instead."""


@dataclass
class Word:
    """A positional word (`flag` empty) or a flag with its value; `joined`: written as --flag=value. `name`: the flag's
    first name. `tokens`: where it stands; none: it is new. `written`: flag and value as they are in the text."""

    flag: str = ""
    value: str | None = None
    joined: bool = False
    name: str = ""
    tokens: Sequence[Token] = ()
    written: tuple[str, str | None] = ("", None)

    def text(self) -> list[str]:
        if not self.flag:
            return [str(self.value)]
        if self.value is None:
            return [self.flag]
        return [f"{self.flag}={self.value}"] if self.joined else [self.flag, self.value]

    def shown(self) -> str:
        if self.value is None:
            return self.flag
        closed = "$" in (self.written[1] or "") and all(token.plain for token in self.tokens)  # as '{"model": "$X"}'
        value = quoted(self.value, expands=not closed)
        return f"{self.flag}={value}" if self.joined else " ".join(part for part in (self.flag, value) if part)

    def edits(self) -> list[Edit]:
        """What has changed of it since it was read."""
        (flag, value), first, last = self.written, self.tokens[0], self.tokens[-1]
        if (flag, value) == (self.flag, self.value):
            return []
        if value == self.value:  # the value's own quotes stay
            return [(first.begin, first.begin + len(flag), self.flag)]
        return [(first.begin, last.end, self.shown())]


@dataclass
class CommandLine:
    """One command of a text. `prefix`: the words before the engine's arguments, its program the last of them; a
    container's own flags and assignments stand among them. `changes`: a line on each change made; `warnings`: on what
    a person has to decide."""

    text: str
    prefix: Sequence[Token] = ()
    words: list[Word] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    removed: list[Word] = field(default_factory=list)
    added: list[Word] = field(default_factory=list)
    edited: list[Edit] = field(default_factory=list)

    @classmethod
    def parse(
        cls, text: str, tokens: Sequence[Token], begin: int, known: Definitions | None, *, model: bool
    ) -> CommandLine:
        """`begin`: the place of the program among the tokens. `model`: its first positional word is no flag that lost
        its dashes."""
        line, rest = cls(text, tokens[: begin + 1]), list(tokens[begin + 1 :])
        while rest:
            token = rest.pop(0)
            flag, equals, value = token.value.partition("=")
            mended = _mended(flag, known) if not model or line.words or flag.startswith("-") else flag
            if not mended.startswith("-") or re.fullmatch(r"-[\d.]*", mended):
                line.words.append(Word(value=token.value, tokens=(token,), written=("", token.value)))
                continue
            found = known.find(mended) if known else ()
            word = Word(flag=flag, joined=bool(equals), name=found[0] if len(found) == 1 else mended, tokens=(token,))
            if equals:
                word.value = value
            elif rest and _takes_value(known, word.name, rest[0].value) and not re.match(r"-[-A-Za-z]", rest[0].value):
                word.value, word.tokens = rest[0].value, (token, rest.pop(0))
            word.written, word.flag = (flag, word.value), mended
            if mended != flag:
                line.changes.append(f"{flag} -> {mended}")
            line.words.append(word)
        return line

    def find(self, *flags: str) -> Word | None:
        return next((word for word in self.words if word.flag and {word.flag, word.name} & set(flags)), None)

    def take(self, *flags: str) -> Word | None:
        """Remove and return the first of these flags."""
        word = self.find(*flags)
        if word:
            self.remove(word)
        return word

    def remove(self, word: Word) -> None:
        self.words.remove(word)
        (self.removed if word.tokens else self.added).append(word)
        if not word.tokens:
            self.added = [each for each in self.added if each is not word]

    def put(self, flag: str, value: str | None = None) -> None:
        word = Word(flag, value, name=flag)
        self.words.append(word)
        self.added.append(word)

    def rename(self, old: str, new: str) -> None:
        for word in self.words:
            if word.flag == old:
                word.flag = word.name = new
                self.changes.append(f"{old} -> {new}")

    def unvalue(self, known: Definitions) -> None:
        """Switches with True or False become switches alone, --no-NAME, or nothing."""
        for word in list(self.words):
            kind = known.kinds.get(word.name)
            says = (word.value or "").lower()
            if kind not in ("switch", "boolean") or says not in ("true", "false"):
                continue
            before = " ".join(word.text())
            negative = f"--no-{word.name[2:]}" if kind == "boolean" else ""
            if says == "true":
                word.value, word.joined = None, False
            elif negative:
                word.flag, word.value, word.joined = negative, None, False
            else:
                self.remove(word)
            self.changes.append(f"{before} -> {word.flag if word in self.words else 'nothing: it is off anyway'}")

    def drop(self, flag: str, why: str, *, switch: bool = False) -> None:
        """Remove a flag with its value. A word after a `switch` is not its value, and stays."""
        while word := next((each for each in self.words if each.flag == flag), None):
            place = self.words.index(word)
            if switch and word.value is not None and not word.joined:
                after = word.tokens[1]
                self.words.insert(place + 1, Word(value=word.value, tokens=(after,), written=("", word.value)))
                word.value, word.tokens = None, word.tokens[:1]
            self.remove(word)
            self.changes.append(f"{' '.join(word.text())} removed: {why}")

    def assigned(self, name: str) -> Token | None:
        """The word before the program that sets this variable."""
        return next((token for token in self.prefix if token.value.startswith(f"{name}=")), None)

    def erase(self, token: Token) -> None:
        self.edited.append((*_with_blank(self.text, token.begin, token.end), ""))

    def replace(self, token: Token, text: str) -> None:
        self.edited.append((token.begin, token.end, text))

    def edits(self) -> list[Edit]:
        """All changes of the text. What is new stands where the first word was taken out, else at the end."""
        found = [*self.edited, *(edit for word in self.words if word.tokens for edit in word.edits())]
        new = " ".join(word.shown() for word in self.words if not word.tokens)
        places = sorted((word.tokens[0].begin, word.tokens[-1].end) for word in self.removed)
        for index, (begin, end) in enumerate(places):
            if new and not index:
                found.append((begin, end, new))
            else:
                found.append((*_with_blank(self.text, begin, end), ""))
        if new and not places:
            last = max((word.tokens[-1].end for word in self.words if word.tokens), default=self.prefix[-1].end)
            found.append((last, last, f" {new}"))
        return found


def applied(text: str, edits: Sequence[Edit]) -> str:
    for begin, end, instead in sorted(edits, reverse=True):
        text = text[:begin] + instead + text[end:]
    return text


def _with_blank(text: str, begin: int, end: int) -> tuple[int, int]:
    """A word with the blanks, or the continued line's end, before it; at the begin of a line with those behind it."""
    before = re.search(r"(?:[ \t]|\\\r?\n)+$", text[:begin])
    if before and before.start() and text[before.start() - 1] != "\n":
        return before.start(), end
    after = re.match(r"[ \t]+", text[end:])
    return begin, end + (after.end() if after else 0)


def _takes_value(known: Definitions | None, name: str, value: str) -> bool:
    """Switches once took True and False."""
    if known is None or name not in known.kinds:
        return True
    return known.kinds[name] not in ("switch", "boolean", "logical") or value.lower() in ("true", "false")


def _mended(flag: str, known: Definitions | None) -> str:
    """A flag with the dashes that it lost on a web page, or with - for _ where the engine wants that."""
    if known is None or (flag.startswith("-") and known.find(flag.partition(".")[0])):
        return flag
    bare = flag.lstrip("-")
    short = flag.startswith("-") and not flag.startswith("--") and not re.search("[-_]", bare)
    if short or not re.fullmatch(r"[a-z][\w.-]+", bare):
        return flag
    spelled = [f"--{bare}"] if flag != f"--{bare}" else []
    spelled += [f"--{bare.replace('_', '-')}"] if flag.startswith("--") else []
    spelled += [f"--{bare.replace('-', '_')}"] if flag.startswith("-") else []
    exact = known.kinds.keys() | known.aliases.keys()
    return next((each for each in spelled if each in exact or known.kinds.get(each.replace("--no-", "--"))), flag)
