"""Values of options: what the line, the environment or a file says, as the type that the command declares.

In place of typer's own, which imports pydantic and makes an adapter for each option: 0.1 s before anything begins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from headstart.errors import UsageError

WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


def with_values(items: list[Any]) -> list[Any]:
    """Options and arguments of a command, to be read as here."""
    for item in items:
        item.get_runtime_param = Value(item).itself
    return items


class Value:
    """Of one option or argument, as typer asks for it."""

    def __init__(self, item: Any) -> None:
        self.kind, self._info = item.type_descriptor.annotation, item.type_descriptor.parameter_info

    def itself(self) -> Value:
        """What typer calls a runtime parameter, and asks an option for."""
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Raises UsageError, naming the option, for what is no such value."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if (several := get_origin(self.kind)) not in (list, tuple):
            return self._checked(self.kind, value, param, ctx)
        values = value if isinstance(value, list | tuple) else [value]
        kinds = get_args(self.kind) * (len(values) if several is list else 1)
        return several(self._checked(kind, each, param, ctx) for kind, each in zip(kinds, values, strict=True))

    def _checked(self, kind: Any, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return self._of(kind, value)
        except (ValueError, TypeError, OverflowError) as error:
            wanted = str(error) if isinstance(error, _OutOfRange) else WORDS.get(kind, "a text")
            what = f"{max(param.opts, key=len)} is {value!r}, but must be {wanted}"
            raise UsageError(what, f"see {ctx.command_path} --help") from None

    def _of(self, kind: Any, value: Any) -> Any:
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise _OutOfRange(f"one of {', '.join(get_args(kind))}")
        if kind is int:
            return self._bounded(_whole(value))
        if kind is float:
            return self._bounded(float(value))
        if kind is bool and not isinstance(value, bool):  # settings have read their words
            raise ValueError
        return kind(value) if kind in (str, Path) else value

    def _bounded(self, number: float) -> float:
        low, high = self._info.min, self._info.max
        if low is not None and number < low:
            raise _OutOfRange(f"at least {low}")
        if high is not None and number > high:
            raise _OutOfRange(f"at most {high}")
        return number


class _OutOfRange(ValueError):
    """Says what would be in it."""


def _whole(value: Any) -> int:
    number = float(value) if isinstance(value, str) and "." in value else value
    whole = int(number)
    if isinstance(number, float) and whole != number:
        raise ValueError
    return whole
