"""Programs with LoRA adapters: `Ops.linear` becomes `Ops.adapted_linear` where the weight has adapters."""

from collections.abc import Mapping
from typing import Any, cast

from headstart.kernels.ops import Buffer, LoraTable, Ops, Program, StepInputs, Weight


class AdaptedOps:
    """`Ops` whose products with adapted matrices add their adapters' factors. All other ops are those of `ops`.

    tables: adapters of a matrix, by the id() of its weight.
    """

    def __init__(self, ops: Ops, tables: Mapping[int, LoraTable]) -> None:
        self._ops, self._tables = ops, tables

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Buffer, weight: Weight, bias: Weight | None = None) -> Buffer:
        """See Ops.linear."""
        table = self._tables.get(id(weight))
        return self._ops.linear(x, weight, bias) if table is None else self._ops.adapted_linear(x, weight, bias, table)


def adapted(code: Program, tables: Mapping[int, LoraTable]) -> Program:
    """The same program with adapters. tables: as in AdaptedOps."""
    return lambda ops, step: code(cast(Ops, AdaptedOps(ops, tables)), step)


def multiplied_weights(code: Program) -> set[int]:
    """The id() of each weight that a program multiplies by `Ops.linear`, the only op that adapters change."""
    traced = _LinearTrace()
    code(cast(Ops, traced), StepInputs(None, None, None))
    return traced.weights


class _LinearTrace:
    """`Ops` that compute nothing and record the weights of `linear`. A buffer is a plain object."""

    def __init__(self) -> None:
        self.weights: set[int] = set()

    def linear(self, x: Buffer, weight: Weight, bias: Weight | None = None) -> Buffer:
        self.weights.add(id(weight))
        return object()

    def add_rms_norm(self, *inputs: object) -> tuple[Buffer, Buffer]:
        return object(), object()

    def __getattr__(self, name: str) -> Any:
        return lambda *inputs, **options: object()
