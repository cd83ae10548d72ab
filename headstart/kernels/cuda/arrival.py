"""Numbers on their way from the device to the host, which waits for them only when it reads them."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class Arrival:
    """The values that a tensor has now; what is launched afterwards may change it."""

    def __init__(self, x: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = x.clone()

    def numpy(self) -> NDArray[Any]:
        """Waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
