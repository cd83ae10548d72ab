"""Building without values: `shapes_of` records names and shapes of the tensors that a `build` asks for, `UnreadWeights`
compares them with those of a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headstart.kernels.ops import Backend, RawTensor, Weight
from headstart.layers.weights import Shapes, Weights


def shapes_of(build: Callable[[Weights], object]) -> Shapes:
    """What `build` asks for, in its order, under the names of new models: experts one by one, optional tensors as in
    Weights.has, none of Weights.unlisted."""
    recorder = _Recorder()
    build(recorder)
    return recorder.shapes


class UnreadWeights(Weights):
    """Weights of a checkpoint whose names and shapes are checked, and whose values are never read."""

    def __init__(self, tensors: Mapping[str, RawTensor], source: str) -> None:
        super().__init__(tensors, cast(Backend, None), source)

    def raw(self, name: str, *shapes: tuple[int, ...]) -> RawTensor:
        return Valueless(name, tuple(self.found(name, *shapes).shape))

    def get(self, name: str, *shape: int, precise: bool = False) -> Weight:
        self.raw(name, shape)

    def take(self, make: Callable[[], RawTensor], *, precise: bool = False) -> Weight:
        return None

    def take_each(self, make: Callable[[], Iterable[RawTensor]], *, precise: bool = False) -> tuple[Weight, ...]:
        return ()

    def constant(self, name: str, values: Callable[[], NDArray[Any]]) -> Weight:
        return None

    def index(self, values: Callable[[], NDArray[np.int64]]) -> Weight:
        return None


class _Recorder(UnreadWeights):
    """Weights that have every tensor, and no values."""

    def __init__(self) -> None:
        super().__init__({}, "a new model")
        self.shapes: Shapes = {}

    def raw(self, name: str, *shapes: tuple[int, ...]) -> RawTensor:
        self.shapes.setdefault(self._rename(name), shapes[0])
        return Valueless(name, shapes[0])

    def unlisted(self, name: str, *shape: int) -> RawTensor:
        return Valueless(name, shape)

    def has(self, name: str, *, usual: bool = False) -> bool:
        return usual


@dataclass(frozen=True, slots=True)
class Valueless:
    """A RawTensor of zeros, which take no memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "F32"

    def fingerprint(self) -> int:
        return 0

    def float32(self) -> NDArray[np.float32]:
        return np.broadcast_to(np.float32(0), self.shape)

    def take_rows(self, rows: NDArray[np.int64]) -> "Valueless":
        return self.shaped(len(rows), *self.shape[1:])

    def part(self, index: int) -> "Valueless":
        return self.shaped(*self.shape[1:])

    def shaped(self, *shape: int) -> "Valueless":
        return replace(self, shape=shape)

    def transposed(self) -> "Valueless":
        return self.shaped(*self.shape[::-1])

    def plain(self) -> "Valueless":
        return self

    def affine(self, factor: float, offset: float) -> "Valueless":
        return self

    def exp(self) -> "Valueless":
        return self
