"""Declarations of command-line options: fields of dataclasses, which commands read and tools take.

Imports nothing heavy, since every start of the command line reads it.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from headstart.errors import UsageError
from headstart.wording import flag_of

REQUIRED: Any = MISSING
KINDS: Mapping[Any, tuple[str, str]] = {
    int: ("N", "a whole number"),
    float: ("X", "a number"),
    Path: ("PATH", "a path"),
}
"""Type of a value -> its name in --help, and in errors. Other types are texts."""


class ParseError(UsageError):
    """A command line that does not fit its command."""

    def __init__(self, message: str, hint: str = "", *, flag: str = "", is_extra: bool = False) -> None:
        super().__init__(message, hint)
        self.flag = flag  # the unknown option; empty: another error
        self.is_extra = is_extra  # too many arguments


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a command. An option without flags is a positional argument."""

    name: str  # field of the OptionGroup that takes the value
    help: str
    kind: Any = str  # str, int, float, Path, or bool: a switch
    flags: tuple[str, ...] = ()
    default: Any = None  # REQUIRED: the command line or a setting must give a value
    panel: str = "Options"  # heading in --help
    is_rare: bool = False  # its panel is shown with --help-all only
    metavar: str = ""
    is_list: bool = False  # the option may be repeated; an argument takes all remaining words
    is_comma_list: bool = False  # comma-separated values
    num_values: int = 1
    choices: tuple[str, ...] = ()  # the only values
    min: float | None = None
    above: float | None = None  # exclusive minimum
    max: float | None = None
    parse: Callable[[str], Any] | None = None  # replaces the conversion by `kind`
    complete: Callable[[], Iterable[str]] | None = None  # values that a shell may offer
    is_hidden: bool = False
    is_refused: bool = False  # the command refuses it with a reason
    may_be_empty: bool = False
    must_exist: bool = False  # a path that is read
    is_output: bool = False  # a path that is written, whose folder is made

    @classmethod
    def of_type(cls, hint: Any, **more: Any) -> Self:
        """An option of X, X | None, Literal (choices), list[X] or Sequence[X] (repeated), tuple[X, ...] (commas) or
        tuple[X, X]."""
        if type(None) in get_args(hint):
            hint = next(each for each in get_args(hint) if each is not type(None))
        if get_origin(hint) is Literal:
            return cls(**{"choices": get_args(hint), "metavar": "|".join(get_args(hint)), **more})
        if get_origin(hint) in (list, Sequence):
            return cls(kind=get_args(hint)[0], is_list=True, **more)
        if get_origin(hint) is tuple:
            kinds = get_args(hint)
            more |= {"is_comma_list": True} if ... in kinds else {"num_values": len(kinds)}
            return cls(kind=kinds[0], **more)
        return cls(kind=hint, **more)

    @property
    def is_argument(self) -> bool:
        return not self.flags

    @property
    def is_switch(self) -> bool:
        return self.kind is bool and not self.is_comma_list

    @property
    def label(self) -> str:
        """The longest flag; of an argument its name in capitals."""
        return max(self.flags, key=len, default=(self.metavar or self.name).upper())

    @property
    def value_name(self) -> str:
        """The name of the value in --help."""
        word = KINDS[self.kind][0] if self.kind in KINDS and not self.is_comma_list else "TEXT"
        return self.metavar or " ".join([word] * self.num_values)

    @property
    def usage(self) -> str:
        """The option with the name of its value and its help, as a hint."""
        return f"{self.label} {self.value_name}: {self.help}".replace("  ", " ")

    @property
    def default_value(self) -> Any:
        """The default as the value of the option."""
        return () if self.is_comma_list and self.default is None else self.default

    @property
    def default_text(self) -> str:
        """The default for --help; empty without one."""
        if self.is_switch or self.default in (None, ()):
            return ""
        return ",".join(map(str, self.default)) if self.is_comma_list else str(self.default)

    def read(self, given: Any) -> Any:
        """The value of a text, of a list of texts, or of a switch, which inverts its default. Raises ParseError, naming
        the option."""
        if self.is_switch:
            return given != bool(self.default)
        if self.is_comma_list:
            return self._read_comma_list(given)
        if self.num_values > 1 and len(given) != self.num_values:
            raise ParseError(f"{self.label} needs {self.num_values} values", self.usage)
        if self.is_list or self.num_values > 1:
            return (list if self.is_list else tuple)(self._read_one(text) for text in given)
        return self._read_one(given)

    def _read_one(self, text: str) -> Any:
        try:
            value = self._convert(text)
        except (ValueError, OverflowError):
            raise ParseError(f"{self.label} is {text!r}, but must be {KINDS[self.kind][1]}", self.usage) from None
        return self._checked(value, text)

    def _read_comma_list(self, text: str) -> tuple[Any, ...]:
        """Each value once."""
        try:
            values = tuple(dict.fromkeys(self._convert(each.strip()) for each in text.split(",")))
        except (ValueError, KeyError):
            wrong = f"{self.label} is {text!r}, which is not a list of such values"
            raise ParseError(wrong, self.usage) from None
        return tuple(self._checked(value, text) for value in values)

    def _checked(self, value: Any, text: str) -> Any:
        if self.must_exist and not value.exists():
            raise ParseError(f"{self.label}: {text} does not exist", "is the path right?")
        if self.is_output and not _can_write(value):
            raise ParseError(f"{self.label}: {text} cannot be written", "name a place that you may write to")
        hint = self.usage
        if self.choices and value not in self.choices:
            wanted, hint = f"one of {', '.join(self.choices)}", f"leave {self.label} out for the default"
        elif self.min is not None and not value >= self.min:
            wanted = f"at least {self.min}"
        elif self.above is not None and not value > self.above:
            wanted = f"above {self.above}"
        elif self.max is not None and not value <= self.max:
            wanted = f"at most {self.max:,}"
        else:
            return value
        raise ParseError(f"{self.label} is {text!r}, but must be {wanted}", hint)

    def _convert(self, text: str) -> Any:
        if self.parse:
            return self.parse(text)
        if self.kind is int and "." in text:
            number = float(text)
            if int(number) != number:
                raise ValueError
            return int(number)
        return self.kind(text) if self.kind in KINDS else text


def _can_write(path: Path) -> bool:
    folder = next((each for each in path.absolute().parents if each.exists()), path.absolute())
    return folder.is_dir() and os.access(folder, os.W_OK)


def option(help: str, *flags: str, default: Any = None, repr: bool = True, **more: Any) -> Any:
    """A field of an OptionGroup; without `flags` its flag is the field's name. `more`: fields of Option."""
    return field(default=default, repr=repr, metadata={"help": help, **({"flags": flags} if flags else {}), **more})


def argument(help: str, *, default: Any = None, **more: Any) -> Any:
    """A field of an OptionGroup that a positional argument sets."""
    return field(default=default, metadata={"help": help, "flags": (), **more})


class OptionGroup:
    """Base of frozen dataclasses whose fields are `option(...)` and `argument(...)`."""

    panel: ClassVar[str] = "Options"

    @classmethod
    def options(cls) -> list[Option]:
        """The options of the fields of this group."""
        hints = get_type_hints(cls)
        return [
            Option.of_type(
                hints[item.name],
                name=item.name,
                default=item.default,
                **{"panel": cls.panel, "flags": (flag_of(item.name),), **item.metadata},
            )
            for item in fields(cls)  # type: ignore[arg-type]
        ]

    @classmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        """The group with these values by option name. Raises UsageError for values that contradict each other."""
        return cls(**values)

    def chosen(self) -> dict[str, Any]:
        """Values by name, without those that are None; those of repeated options as tuples."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(self).items()}
        return {name: value for name, value in values.items() if value is not None}


MODEL_HELP = "A path, a .gguf file, a Hugging Face repo id or an alias; none: the default model, a tiny demo model."


def model_names() -> list[str]:
    """Models with a short name, for shell completion."""
    from headstart import hub

    return [*hub.builtin_names(), *hub.published_models()]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """The model of a command."""

    model: str | None = argument(MODEL_HELP, complete=model_names)
