"""What options take: every kind of value that a command declares, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.core import TyperCommand

from headstart.cli.help import Command
from headstart.errors import UsageError


class Alone(Command):
    """Without settings, which look for the commands around it."""

    parse_args = TyperCommand.parse_args


def parsed(line: str) -> dict[str, Any]:
    """What a command with an option of each kind is called with."""
    called: dict[str, Any] = {}
    app = typer.Typer(add_completion=False)

    def run(
        *,
        names: Annotated[list[Path] | None, typer.Argument()] = None,
        count: Annotated[int | None, typer.Option(min=1, max=9)] = None,
        seed: int = 0,
        rate: float | None = None,
        word: str | None = None,
        kind: Annotated[Literal["int8", "int4"] | None, typer.Option()] = None,
        stop: list[int] | None = None,
        pair: tuple[Path, Path] | None = None,
    ) -> None:
        called.update(locals())

    app.command(cls=Alone)(run)
    typer.main.get_command(app).main(line.split(), "it", standalone_mode=False)
    return called


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--count 9", "count", 9),
        ("--seed 5.0", "seed", 5),
        ("--seed 99999999999999999999", "seed", 99999999999999999999),
        ("--rate 1e-3", "rate", 0.001),
        ("--word 7", "word", "7"),
        ("--kind int4", "kind", "int4"),
        ("--stop 1 --stop 2", "stop", [1, 2]),
        ("--pair a b", "pair", (Path("a"), Path("b"))),
        ("a b", "names", [Path("a"), Path("b")]),
        ("", "seed", 0),
        ("", "count", None),
    ],
)
def test_a_value_has_the_type_of_its_option(line: str, name: str, value: Any) -> None:
    assert parsed(line)[name] == value
    assert type(parsed(line)[name]) is type(value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--count 0", "--count is '0', but must be at least 1"),
        ("--count 10", "--count is '10', but must be at most 9"),
        ("--seed 1.5", "--seed is '1.5', but must be a whole number"),
        ("--seed two", "--seed is 'two', but must be a whole number"),
        ("--seed 1.0e999", "--seed is '1.0e999', but must be a whole number"),
        ("--rate fast", "--rate is 'fast', but must be a number"),
        ("--kind int2", "--kind is 'int2', but must be one of int8, int4"),
        ("--stop 1 --stop x", "--stop is 'x', but must be a whole number"),
    ],
)
def test_a_wrong_value_is_told_with_its_option(line: str, message: str) -> None:
    with pytest.raises(UsageError) as told:
        parsed(line)
    assert (told.value.message, told.value.hint) == (message, "see it --help")
