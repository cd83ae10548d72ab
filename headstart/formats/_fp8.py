"""FP8 weights with a scale for each block of rows and columns (`weight_scale_inv` beside a weight), as DeepSeek
publishes them, read as bfloat16: float32(code) * scale, rounded once, like its own conversion script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor, make_tensor
from headstart.formats.rows import Deferred
from headstart.formats.safetensors import bfloat16

SCALES = "_scale_inv"
BLOCK = 128
PACKINGS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_2", ".SCB", ".absmax")
"""Endings of names that belong to quantizations which are not read."""


@dataclass(frozen=True, eq=False)
class BlockScaled(Deferred):
    """A RawTensor [..., rows, columns] whose values are made when they are wanted; scales [..., ceil(rows / block[0]),
    ceil(columns / block[1])]."""

    weight: Tensor
    scales: Tensor
    block: tuple[int, int]

    dtype = "BF16"

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.weight.nbytes + self.scales.nbytes

    def fingerprint(self) -> int:
        return self.weight.fingerprint()

    def read(self) -> Tensor:
        """The plain tensor, in memory."""
        return self._scaled(self.weight, np.arange(self.shape[-2]))

    def _scaled(self, codes: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """Codes of the weight's rows [n], last dimension but one, as bfloat16."""
        columns = np.arange(self.shape[-1]) // self.block[1]
        values = codes.float32() * self.scales.float32()[..., rows // self.block[0], :][..., columns]
        bits, dtype = bfloat16(values)
        return make_tensor(self.name, codes.shape, dtype, bits.reshape(-1).view(np.uint8))

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        if len(self.shape) > 2:
            return self.read().take_rows(rows)
        return self._scaled(self.weight.take_rows(rows), np.asarray(rows))

    def part(self, index: int) -> BlockScaled:
        return BlockScaled(self.weight.part(index), self.scales.part(index), self.block)


def without_scales(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor | BlockScaled]:
    """Tensors with every FP8 weight and its scales made one. ModelError for scales that do not fit, for codes without
    the scales that the config speaks of, and for quantizations that are not read."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    packed = next((name for name in tensors if name.endswith(PACKINGS)), None)
    if packed:
        raise ModelError(
            f"{packed}: weights quantized as {method or 'something unknown'} cannot be read",
            "take the unquantized model, FP8 with weight_scale_inv, or a GGUF file",
        )
    found: dict[str, Tensor | BlockScaled] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALES) and name.removesuffix(SCALES) in tensors:
            continue
        if scales := tensors.get(name + SCALES):
            found[name] = _scaled(tensor, scales, config)
        elif tensor.dtype.startswith("F8_") and method:
            raise ModelError(f"{name} is {tensor.dtype}, but no {name + SCALES} is there", "is a shard missing?")
        else:
            found[name] = tensor
    return found


def _scaled(weight: Tensor, scales: Tensor, config: Mapping[str, Any]) -> BlockScaled:
    sizes = (config.get("quantization_config") or {}).get("weight_block_size") or [BLOCK, BLOCK]
    block = int(sizes[0]), int(sizes[1])
    grid = tuple(-(-size // each) for size, each in zip(weight.shape[-2:], block, strict=True))
    if len(weight.shape) < 2 or scales.shape != (*weight.shape[:-2], *grid):
        raise ModelError(
            f"the scales of {weight.name} are {list(scales.shape)}, but {list(weight.shape)} has blocks of "
            f"{block[0]} x {block[1]}",
            "quantization_config.weight_block_size and the tensors must agree",
        )
    return BlockScaled(weight, scales, block)
