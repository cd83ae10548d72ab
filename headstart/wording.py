"""Options in the texts of errors: flags (`--depth 3`) on the command line, keywords (`depth=3`) in Python."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

from headstart.errors import HeadstartError


def flag_of(name: str) -> str:
    """The command-line flag of a field."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class OptionRef:
    """An option in a text. As a str: its flag and value."""

    name: str  # field of EngineConfig
    value: str | float | None = None  # False: the option is switched off; a word in capitals: a placeholder

    def __str__(self) -> str:
        if self.value is False:
            return flag_of(f"no_{self.name}")
        return flag_of(self.name) if self.value is None else f"{flag_of(self.name)} {self.value}"

    @property
    def keyword(self) -> str:
        """The keyword argument in Python."""
        if self.value is None:
            return self.name
        is_placeholder = isinstance(self.value, str) and self.value.isalpha() and self.value.isupper()
        return f"{self.name}={self.value if is_placeholder else repr(self.value)}"


@dataclass(frozen=True)
class Removal:
    """The advice to remove an option. Settings name the place from which to remove it."""

    def __str__(self) -> str:
        return "leave it out"


class OptionText(str):
    """A text with typed parts. As a str it is the command line's text. Sums with other texts keep the parts;
    f-strings do not."""

    __slots__ = ("parts",)
    parts: tuple[str | OptionRef | Removal, ...]

    def __new__(cls, *parts: str | OptionRef | Removal) -> "OptionText":
        self = super().__new__(cls, "".join(map(str, parts)))
        self.parts = parts
        return self

    def __add__(self, other: str) -> "OptionText":
        return OptionText(*self.parts, *_parts(other))

    def __radd__(self, other: str) -> "OptionText":
        return OptionText(*_parts(other), *self.parts)

    def worded(self, word: Callable[[OptionRef | Removal], str]) -> str:
        """The text with typed parts in the words of an interface."""
        return "".join(part if isinstance(part, str) else word(part) for part in self.parts)


def option(name: str, value: str | float | None = None) -> OptionText:
    """The text of an option alone (see OptionRef)."""
    return OptionText(OptionRef(name, value))


def joined(separator: str, texts: Iterable[str]) -> str:
    """The texts with the separator between them, with their typed parts."""
    return reduce(lambda before, text: before + separator + text, texts)


LEAVE_OUT = OptionText(Removal())


def _parts(text: str) -> tuple[str | OptionRef | Removal, ...]:
    return text.parts if isinstance(text, OptionText) else (text,)


@contextmanager
def errors_with_keywords(*, wanted: bool = True) -> Iterator[None]:
    """Errors inside name options by keyword, for callers in Python. wanted: False keeps flags."""
    try:
        yield
    except HeadstartError as error:
        for name, text in vars(error).items() if wanted else ():
            if isinstance(text, OptionText):
                setattr(error, name, text.worded(_keyword))
        error.args = (error.message,)
        raise


def _keyword(part: OptionRef | Removal) -> str:
    return part.keyword if isinstance(part, OptionRef) else str(part)
