"""Sizes by symbol: expressions over the keys of a config.json, such as `heads * (nope + rope)`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "transformer_layer_config")
"""Keys under which a config keeps that of its language model, or of its drafter's layers."""
MOST = 2**40
"""No size is larger; a config may say anything."""
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Sub: operator.sub,
    ast.Div: operator.floordiv,
}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's own settings; a multimodal config nests them. Outer values stand where none are inside."""
    text = dict(config)
    for key in NESTED:
        if isinstance(inner := config.get(key), dict):
            text |= text_config(inner) if key == "thinker_config" else inner
    return text


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key, dots stepping into objects; None where there is none."""
    value: Any = config
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def as_size(value: object) -> int | None:
    """A whole number that can be a size; a list counts its items. None for anything else."""
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None


class Sizes:
    """The symbols of one checkpoint: `symbols` is the table's section, `config` what `text_config` gives."""

    def __init__(self, symbols: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any]) -> None:
        self.config = config
        self._symbols = symbols
        self._known: dict[str, int | None] = {}

    def value(self, symbol: str) -> int | None:
        """A symbol's number; None where the config does not say it."""
        if symbol not in self._known:
            row = self._symbols[symbol]
            sizes = (as_size(lookup(self.config, key)) for key in row["keys"])
            there = next((size for size in sizes if size is not None), None)
            self._known[symbol] = self.evaluate(row["else"]) if there is None and "else" in row else there
        return self._known[symbol]

    def evaluate(self, expression: str) -> int | None:
        """An expression of whole numbers, symbols, + - * / and brackets; None for what is not known."""
        return None if expression[0] in "*?" else self._walk(_parse(expression))

    def shape(self, dims: Sequence[str]) -> tuple[int | str | None, ...]:
        """A size for each expression; None for "*", and the expression itself where its size is not known."""
        sizes = [(each, self.evaluate(each)) for each in dims]
        return tuple(size if size is not None or each == "*" else each for each, size in sizes)

    def _walk(self, node: ast.expr) -> int | None:
        if isinstance(node, ast.Constant):
            return int(node.value)  # type: ignore[arg-type]  # the table holds whole numbers only
        if isinstance(node, ast.Name):
            return self.value(node.id)
        assert isinstance(node, ast.BinOp), ast.dump(node)
        left, right = self._walk(node.left), self._walk(node.right)
        if left is None or right is None or (isinstance(node.op, ast.Div) and right == 0):
            return None
        return _OPERATIONS[type(node.op)](left, right)


@cache
def _parse(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body
