"""Numeric options of commands: invalid and extreme values have a one-line error that names the option."""

from collections.abc import Iterator

import pytest

from headstart.cli.app import application
from headstart.cli.main import main
from headstart.cli.parser import all_commands

Capture = pytest.CaptureFixture[str]
MODEL = "/nowhere/no-such-model"
"""With an accepted value the command fails at this name, so that no model is loaded."""
NEEDED = {
    "generate": ["--prompt", "hi"], "plan": ["--gpu", "h100"], "data": ["--out", "/nowhere/out", "--tokens", "10"],
    "train": ["--out", "/nowhere/out", "--data", __file__, "--tokens", "10"], "gate": ["/nowhere/new"],
}  # fmt: skip
LISTS = {
    "plan": {"--batch", "--depth", "--acceptance", "--price-per-hour"},
    "bench run": {"--concurrency", "--request-rate", "--temperature"},
    "bench step": {"--rows"},
    "tune": {"--concurrency"},
    "verify": {"--temperatures", "--depths", "--batch-sizes", "--chunk-sizes", "--thread-counts", "--seeds"},
}
"""Options with comma-separated numbers, which the command parses."""
NO_NUMBER = ("nan", "inf", "")
ODD = ("-1", "0", "1e30", "99999999999999999999", ",")


def numbers() -> Iterator[tuple[str, str]]:
    """Pairs of a command and a numeric option; shared options once."""
    seen = set()
    for name, command in all_commands(application()).items():
        if name in ("launch", "serve") or all(item.name != "model" for item in command.options):
            continue
        for item in command.options:
            flag = "" if item.is_argument else item.label
            number = item.kind in (int, float) and not item.is_list and not item.is_comma_list
            if flag and (number or flag in LISTS.get(name, ())) and (flag, item.help) not in seen:
                seen.add((flag, item.help))
                yield name, flag


NUMBERS = list(numbers())


def error_of(command: str, flag: str, value: str, capsys: Capture) -> str:
    """Error message of a command for a value: the value is refused or the model is not found."""
    needed = list(NEEDED.get(command, ()))
    bounds = {"--tokens", "--minutes"} if command == "train" else {flag}
    for other in bounds & set(needed) if flag in bounds else ():
        del needed[needed.index(other) : needed.index(other) + 2]
    arguments = [*command.split(), MODEL, *needed, f"{flag}={value}"]
    code = main(arguments)
    shown = capsys.readouterr()
    assert code == 2, (arguments, shown.err)
    lines = [line for line in shown.err.splitlines() if not line.startswith("3 pairs show speeds")]
    assert lines[0].startswith("headstart: error: "), shown.err
    assert "Traceback" not in shown.err
    return shown.err


def test_list_options_exist() -> None:
    assert {(name, flag) for name, flags in LISTS.items() for flag in flags} <= set(NUMBERS)
    assert len(NUMBERS) > 50


@pytest.mark.parametrize(("command", "flag"), NUMBERS)
def test_invalid_numbers_name_the_option(command: str, flag: str, capsys: Capture) -> None:
    for value in NO_NUMBER:
        name = flag.strip("-").removesuffix("s")
        assert name in error_of(command, flag, value, capsys).replace("_", "-"), value


@pytest.mark.slow
@pytest.mark.parametrize(("command", "flag"), NUMBERS)
def test_extreme_numbers_have_a_one_line_error(command: str, flag: str, capsys: Capture) -> None:
    for value in ODD:
        error_of(command, flag, value, capsys)
