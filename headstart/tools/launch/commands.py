"""A command line taken apart, so that single flags can be renamed, dropped or folded into others."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from headstart.errors import UsageError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


@dataclass
class Word:
    """A positional word (`flag` empty) or a flag with its value; `joined`: written as --flag=value."""

    flag: str = ""
    value: str | None = None
    joined: bool = False

    def text(self) -> list[str]:
        if not self.flag:
            return [str(self.value)]
        if self.value is None:
            return [self.flag]
        return [f"{self.flag}={self.value}"] if self.joined else [self.flag, self.value]


@dataclass
class CommandLine:
    """Environment, words, and a line on each change made."""

    environment: dict[str, str] = field(default_factory=dict)
    words: list[Word] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    begin: int = 0  # place of the engine's program; a container's own flags stand before it

    @classmethod
    def parse(cls, text: str) -> CommandLine:
        """Raises UsageError for a text that a shell could not read. Backslashes at ends of lines join them."""
        try:
            parts = shlex.split(text.replace("\\\n", " "))
        except ValueError as error:
            raise UsageError(f"--translate: {error}", "put the whole command line in quotes") from None
        line = cls()
        while parts and _ASSIGNMENT.fullmatch(parts[0]):
            name, _, value = parts.pop(0).partition("=")
            line.environment[name] = value
        for index, part in enumerate(parts):
            if part.startswith("-") and len(part) > 1 and not re.fullmatch(r"-[\d.]+", part):
                flag, equals, value = part.partition("=")
                line.words.append(Word(flag, value if equals else None, bool(equals)))
            elif line.words and line.words[-1].flag and line.words[-1].value is None and index:
                line.words[-1].value = part
            else:
                line.words.append(Word(value=part))
        return line

    def find(self, *flags: str) -> Word | None:
        return next((word for word in self.words if word.flag in flags), None)

    def take(self, *flags: str) -> Word | None:
        """Remove and return the first of these flags."""
        word = self.find(*flags)
        if word:
            self.words.remove(word)
        return word

    def put(self, flag: str, value: str | None = None) -> None:
        self.words.append(Word(flag, value))

    def rename(self, old: str, new: str) -> None:
        for word in self.words:
            if word.flag == old:
                word.flag = new
                self.changes.append(f"{old} -> {new}")

    def drop(self, flag: str, why: str, *, switch: bool = False) -> None:
        """Remove a flag with its value. A word after a `switch` is not its value, and stays."""
        while word := self.find(flag):
            place = self.words.index(word)
            self.words.remove(word)
            if switch and word.value is not None and not word.joined:
                self.words.insert(place, Word(value=word.value))
                word.value = None
            self.changes.append(f"{' '.join(word.text())} removed: {why}")

    def text(self) -> str:
        parts = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join(parts + [shlex.quote(part) for word in self.words for part in word.text()])
