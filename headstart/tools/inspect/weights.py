"""The weights that tensors stand for: packed ones unpacked in shape, scales counted with their weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from headstart.formats.base import Tensor
from headstart.formats.quantization import FLOATS, Shape, Weights

_TABLES = ("BOOL", "I64", "I32", "I16")
"""Types of masks and token ids: no parameters."""


class Weight(NamedTuple):
    """One weight. `shape` is None where packing hides it; `nbytes` counts its scales too. `problem`: what headers say
    against it, such as scales that are not there."""

    shape: Shape | None
    kind: str
    parameters: int
    nbytes: int
    quantized: bool
    problem: str = ""


def weights_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Weight]:
    """Weights by name; the name of a packed one ends in `.weight` too."""
    weights = Weights(tensors, config)
    described = {}
    for name, stored in weights.stored.items():
        main, (_, (shape, kind)) = stored.main, weights.look(stored)
        table = main.dtype in _TABLES and not stored.beside
        count = 2 * main.nbytes if shape is None else 0 if table else math.prod(shape)
        nbytes = main.nbytes + sum([each.nbytes for each in stored.beside.values()])
        quantized = kind not in FLOATS + _TABLES
        described[name] = Weight(shape, kind, count, nbytes, quantized, weights.problem(stored))
    return described
