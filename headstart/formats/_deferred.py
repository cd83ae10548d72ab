"""What tensors that are made when they are wanted have in common: everything but their rows goes through the whole."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from headstart.formats.base import Tensor


class Deferred(ABC):
    """A RawTensor, but for its name, shape, dtype and rows."""

    @abstractmethod
    def read(self) -> Tensor:
        """The plain tensor, in memory."""

    def float32(self) -> NDArray[np.float32]:
        return self.read().float32()

    def shaped(self, *shape: int) -> Tensor:
        return self.read().shaped(*shape)

    def affine(self, factor: float, offset: float) -> Tensor:
        return self.read().affine(factor, offset)

    def exp(self) -> Tensor:
        return self.read().exp()

    def transposed(self) -> Tensor:
        return self.read().transposed()

    def plain(self) -> Tensor:
        return self.read().plain()
