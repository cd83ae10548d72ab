"""Numbers on their way between host and device. The host waits only for those that it reads: a copy that torch calls
blocking would have it wait for all that has been launched before."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sent(array: NDArray[Any], place: torch.device) -> Tensor:
    """A copy there. What is not pinned is copied aside at once, so the array may change afterwards."""
    host = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    return host.to(place, non_blocking=True, copy=True)


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
