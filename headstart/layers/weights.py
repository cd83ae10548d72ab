"""Named tensors of a checkpoint with shape checks, converted for a backend; fingerprints of weights."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import make_tensor
from headstart.kernels.ops import Backend, RawTensor, Weight
from headstart.kernels.specs import ConvSpec
from headstart.layers.linear import BOUNDS, Clip, ClippedLinear, Linear
from headstart.layers.norm import LayerNorm, RMSNorm

Shapes = dict[str, tuple[int, ...]]  # canonical tensor names and their shapes


class Weights:
    """Backend weights by canonical name, with shape checks. A tensor requested twice (tied weights) is converted once.

    `drafts`: these weights only serve drafting (see Backend.weight). `on_take` is called with each tensor to convert.
    The order of requests is the order in which random weights are drawn (models/small.py).
    """

    def __init__(
        self, tensors: Mapping[str, RawTensor], backend: Backend, source: str, *, drafts: bool = False,
        on_take: Callable[[RawTensor], None] = lambda tensor: None,
    ) -> None:  # fmt: skip
        self.tensors, self.backend, self.source, self.drafts = tensors, backend, source, drafts
        self.on_take = on_take
        self.used: set[str] = set()
        self._rename: Callable[[str], str] = lambda name: name
        self._change: Callable[[str, RawTensor], RawTensor] = lambda name, tensor: tensor
        self.converted: list[Weight] = []  # in the order of conversion
        self._taken: dict[str, Weight] = {}

    def raw(self, name: str, *shapes: tuple[int, ...]) -> RawTensor:
        """The file's tensor. Raises ModelError when it is absent or has none of these shapes."""
        return self._change(name, self.found(name, *shapes))

    def found(self, name: str, *shapes: tuple[int, ...]) -> RawTensor:
        """`raw` without changes of values."""
        stored = self._rename(name)
        tensor = self.tensors.get(stored)
        if tensor is None:
            raise ModelError(f"{self.source} has no tensor {stored}", "is the checkpoint complete, and of this family?")
        if tuple(tensor.shape) not in shapes:
            what = f"{self.source}: {stored} has shape {tuple(tensor.shape)}, but the config implies {shapes[0]}"
            raise ModelError(what, "do the config and the weights belong together?")
        self.used.add(stored)
        return tensor

    def renamed(self, rename: Callable[[str], str]) -> Self:
        """The same weights under other names. rename: name that is asked for -> name in the file."""
        view = copy(self)
        view._rename, view._taken = rename, {}
        return view

    def changed(self, change: Callable[[str, RawTensor], RawTensor]) -> Self:
        """The same weights with other values. change: (name, tensor in the file) -> tensor of that shape."""
        view = copy(self)
        view._change, view._taken = change, {}
        return view

    def get(self, name: str, *shape: int, precise: bool = False) -> Weight:
        if name not in self._taken:
            self._taken[name] = self._convert(self.raw(name, shape), precise=precise)
        return self._taken[name]

    def take(self, make: Callable[[], RawTensor], *, precise: bool = False) -> Weight:
        """A tensor made of raw ones, in the backend's form. `make` also makes index arrays: it is not called when
        shapes are recorded (layers/shapes.py), which therefore takes no memory for any sizes."""
        return self._convert(make(), precise=precise)

    def take_each(self, make: Callable[[], Iterable[RawTensor]], *, precise: bool = False) -> tuple[Weight, ...]:
        """`take` for several tensors, of heads or experts."""
        return tuple(self._convert(each, precise=precise) for each in make())

    def _convert(self, tensor: RawTensor, *, precise: bool) -> Weight:
        self.on_take(tensor)
        return self._on_backend(tensor, precise=precise)

    def _on_backend(self, tensor: RawTensor, *, precise: bool) -> Weight:
        self.converted.append(self.backend.weight(tensor, drafts=self.drafts, precise=precise))
        return self.converted[-1]

    def unlisted(self, name: str, *shape: int) -> RawTensor:
        """`raw` without a place among the recorded shapes: for a tensor of another network, one that no file holds
        (models/tensors.py), or one whose shape is checked before its turn."""
        return self.raw(name, shape)

    def has(self, name: str, *, usual: bool = False) -> bool:
        """Whether there is an optional tensor. `usual`: whether new models have it (layers/shapes.py)."""
        return self._rename(name) in self.tensors

    def linear(self, prefix: str, num_out: int, num_in: int, *, bias: bool = False) -> Linear:
        """A matrix [num_out, num_in]; clipped if the checkpoint has its bounds."""
        weight = self.get(f"{prefix}.weight", num_out, num_in)
        offset = self.get(f"{prefix}.bias", num_out) if bias else None
        if not self.has(f"{prefix}.{BOUNDS[0]}"):
            return Linear(weight, offset)
        bounds = [self.scalar(f"{prefix}.{name}") for name in BOUNDS]
        return ClippedLinear(
            weight, offset, inputs=self._clip(num_in, *bounds[:2]), outputs=self._clip(num_out, *bounds[2:])
        )

    def linears(self, prefix: str, sizes: Mapping[str, tuple[int, int]], *, bias: bool = False) -> dict[str, Linear]:
        """Matrices by name under `prefix`, of sizes (num_out, num_in); the biases are asked for after all matrices."""
        for name, size in sizes.items():
            self.raw(f"{prefix}.{name}.weight", size)
        return {name: self.linear(f"{prefix}.{name}", *size, bias=bias) for name, size in sizes.items()}

    def _clip(self, width: int, low: float, high: float) -> Clip:
        return Clip(self.filled(low, width), self.filled(-high, width))

    def norm(self, name: str, size: int, eps: float, *, centered: bool = False, biased: bool = False) -> RMSNorm:
        weight = self.get(f"{name}.weight", size)
        if not centered:
            return RMSNorm(weight, eps)
        return LayerNorm(weight, eps, self.get(f"{name}.bias", size) if biased else None)

    def constant(self, name: str, values: Callable[[], NDArray[Any]]) -> Weight:
        """A constant that no file holds, never quantized; computed and converted once for each `name`."""
        if name not in self._taken:
            array = np.ascontiguousarray(values(), np.float32)
            tensor = make_tensor(name, array.shape, "F32", array.reshape(-1).view(np.uint8))
            self._taken[name] = self._on_backend(tensor, precise=True)
        return self._taken[name]

    def filled(self, value: float, *shape: int) -> Weight:
        """A constant of equal values."""
        return self.constant(f"{shape} times {value}", lambda: np.full(shape, value))

    def zeros(self, size: int) -> Weight:
        return self.filled(0, size)

    def ones(self, size: int) -> Weight:
        return self.filled(1, size)

    def index(self, values: Callable[[], NDArray[np.int64]]) -> Weight:
        """Whole numbers [n] on the backend (Backend.index)."""
        return self.backend.index(values())

    def unweighted_norm(self, size: int, eps: float) -> RMSNorm:
        """A norm whose weight is ones."""
        return RMSNorm(self.ones(size), eps)

    def taps(self, name: str, spec: ConvSpec) -> Weight:
        """Taps of a convolution [width * channels], the oldest first, from a tensor [channels, (1,) width]."""
        channels, width = spec.channels, spec.width
        stored = self.raw(name, (channels, 1, width), (channels, width))
        return self.take(lambda: stored.shaped(channels, width).transposed().shaped(width * channels))

    def scalar(self, name: str) -> float:
        """The number of a tensor [1] or []."""
        return float(self.raw(name, (1,), ()).float32().reshape(()))


def trunk_fingerprint(tensors: Mapping[str, RawTensor]) -> str:
    """Identifies a trunk in any quantization: names and shapes of all tensors, values of vectors (never quantized). The
    LM head does not count: some files of a model with tied embeddings hold it, others do not."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if name == "lm_head.weight":
            continue
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        if len(tensor.shape) == 1:
            digest.update(np.ascontiguousarray(tensor.float32()).tobytes())
    return digest.hexdigest()[:32]


def weights_fingerprint(tensors: Mapping[str, RawTensor]) -> str:
    """Identifies these weights, quantization included: trunk_fingerprint and a few rows of each matrix."""
    digest = hashlib.sha256(trunk_fingerprint(tensors).encode())
    for _, tensor in sorted(tensors.items()):
        if len(tensor.shape) == 2:
            rows = np.unique(np.linspace(0, tensor.shape[0] - 1, 3).astype(np.int64))
            digest.update(np.ascontiguousarray(tensor.take_rows(rows).float32()).tobytes())
    return digest.hexdigest()[:16]
