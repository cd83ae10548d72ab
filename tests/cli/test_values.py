"""Option values: every kind that a command may declare, and errors of wrong values."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from headstart.cli.parser import command
from headstart.errors import UsageError
from headstart.options import OptionGroup, argument, option


@dataclass(frozen=True, kw_only=True)
class Everything(OptionGroup):
    """An option of each kind."""

    names: list[Path] | None = argument("")
    count: int | None = option("", min=1, max=9)
    seed: int = option("", default=0)
    rate: float | None = option("")
    word: str | None = option("", "--word", "-w")
    kind: Literal["int8", "int4"] | None = option("")
    stop: list[int] | None = option("")
    pair: tuple[Path, Path] | None = option("")
    rows: tuple[int, ...] = option("", min=1)
    sizes: tuple[int, ...] = option("", default=(1, 4))
    raw: bool = option("", default=False)


@command("an example")
def run(options: Everything) -> int:
    """Does nothing."""
    return 0


def parse(*words: str) -> dict[str, Any]:
    """The options that a command line sets."""
    given, help_flag = run.split(words)
    assert not help_flag
    return vars(run.read(given)["options"])


@pytest.mark.parametrize(("line", "name", "value"), [
    ("--count 9", "count", 9), ("--seed 5.0", "seed", 5),
    ("--seed 99999999999999999999", "seed", 99999999999999999999),
    ("--rate 1e-3", "rate", 0.001), ("--word 7", "word", "7"), ("--kind int4", "kind", "int4"),
    ("--stop 1 --stop 2", "stop", [1, 2]), ("--pair a b", "pair", (Path("a"), Path("b"))),
    ("a b", "names", [Path("a"), Path("b")]), ("--rows 3,1,3", "rows", (3, 1)), ("--raw", "raw", True),
    ("-w x", "word", "x"), ("-wx", "word", "x"), ("--word=a=b", "word", "a=b"), ("--word --raw", "word", "--raw"),
    ("--word - --raw", "word", "-"), ("a --raw b", "names", [Path("a"), Path("b")]),
    ("--raw -- --word", "names", [Path("--word")]), ("--seed 1 --seed 2", "seed", 2), ("", "rows", ()),
    ("", "sizes", (1, 4)), ("", "seed", 0), ("", "count", None),
])  # fmt: skip
def test_value_has_the_type_of_its_option(line: str, name: str, value: Any) -> None:
    assert parse(*line.split())[name] == value
    assert type(parse(*line.split())[name]) is type(value)


@pytest.mark.parametrize(("line", "message"), [
    ("--count 0", "--count is '0', but must be at least 1"),
    ("--count 10", "--count is '10', but must be at most 9"),
    ("--seed 1.5", "--seed is '1.5', but must be a whole number"),
    ("--seed two", "--seed is 'two', but must be a whole number"),
    ("--seed 1.0e999", "--seed is '1.0e999', but must be a whole number"),
    ("--rate fast", "--rate is 'fast', but must be a number"),
    ("--kind int2", "--kind is 'int2', but must be one of int8, int4"),
    ("--stop 1 --stop x", "--stop is 'x', but must be a whole number"),
    ("--rows 1,0", "--rows is '1,0', but must be at least 1"),
    ("--rows 1,x", "--rows is '1,x', which is not a list of such values"),
    ("--raw=1", "--raw takes no value"), ("--word", "--word needs a value"), ("--pair a", "--pair needs 2 values"),
    ("--word=", "--word is empty"), ("--nonsense=1", "No such option: --nonsense"),
])  # fmt: skip
def test_wrong_value_is_refused_with_its_option(line: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse(*line.split())
    assert refusal.value.message == message
