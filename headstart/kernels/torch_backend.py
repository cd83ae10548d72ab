"""What backends over torch tensors share: pools, copies between them, and torch's sampler."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import Sampled, SamplingRows, TokenLogprob
from headstart.kernels.ops import KVSpec
from headstart.kernels.reference.sampling import logprobs, sample
from headstart.kernels.states import StateSpec


@dataclass(frozen=True, eq=False)
class KVPool:
    """Keys [slots, K, D] and values [slots, K, V]; latent values are a view of the keys."""

    keys: Tensor
    values: Tensor
    latent: bool = False


@dataclass(frozen=True, eq=False)
class StatePool:
    """`states` [slots, *state_shape]; `rows` [owned, kept, W]: row j is at position keeps + j (see
    Backend.state_pool)."""

    states: Tensor
    rows: Tensor


class TorchBackend:
    """Of `Backend` what does not depend on how a program runs. `place`: where tensors lie; `kept`: type of keys and
    values, `hidden`: of hidden states, `summed`: of recurrent states."""

    name: str
    place: torch.device
    kept: torch.dtype
    hidden: torch.dtype
    summed: torch.dtype

    @property
    def runs_on(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.place.type == "cuda" else "cpu"

    def reading(self, files: Sequence[Path]) -> AbstractContextManager[None]:
        return nullcontext()

    def loaded(self) -> None:
        """Nothing is left to do."""

    def index(self, ids: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids, np.int64)).to(self.place)

    def kv_bytes(self, spec: KVSpec) -> int:
        values = 0 if spec.latent else spec.value_width
        return spec.num_kv_heads * (spec.head_dim + values) * self.kept.itemsize

    def kv_pool(self, num_slots: int, spec: KVSpec) -> KVPool:
        keys = self.zeros((num_slots, spec.num_kv_heads, spec.head_dim), self.kept)
        if spec.latent:
            return KVPool(keys, keys[..., : spec.value_width], latent=True)
        return KVPool(keys, self.zeros((num_slots, spec.num_kv_heads, spec.value_width), self.kept))

    def copy_rows(self, pools: Sequence[KVPool], sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        rows, places = self.index(sources), self.index(targets)
        for pool in pools:
            pool.keys[places] = pool.keys[rows]
            if not pool.latent:
                pool.values[places] = pool.values[rows]

    def hidden_bytes(self, width: int) -> int:
        return width * self.hidden.itemsize

    def hidden_pool(self, num_slots: int, width: int) -> Tensor:
        return self.zeros((num_slots, width), self.hidden)

    def state_bytes(self, spec: StateSpec, num_kept: int = 0) -> int:
        return (math.prod(spec.state_shape) + num_kept * spec.row_width) * self.summed.itemsize

    def state_pool(self, num_slots: int, num_owned: int, num_kept: int, spec: StateSpec) -> StatePool:
        rows = self.zeros((num_owned, num_kept, spec.row_width), self.summed)
        return StatePool(self.zeros((num_slots, *spec.state_shape), self.summed), rows)

    @torch.inference_mode()
    def read_slots(self, pool: KVPool | StatePool | Tensor, first: int, count: int) -> NDArray[np.uint8]:
        rows = [_as_bytes(each[first : first + count].cpu()) for each in _tensors(pool)]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    @torch.inference_mode()
    def write_slots(self, pool: KVPool | StatePool | Tensor, first: int, content: NDArray[np.uint8]) -> None:
        tensors = _tensors(pool)
        count = len(content) // sum(each[0].nbytes for each in tensors)
        for each in tensors:
            rows = torch.empty((count, *each.shape[1:]), dtype=each.dtype)
            _as_bytes(rows)[:] = content[: rows.nbytes]
            each[first : first + count] = rows.to(self.place)
            content = content[rows.nbytes :]

    def fingerprint(self) -> str:
        kinds = f"{self.kept} {self.hidden} {self.summed}"
        return f"{self.name} {torch.__version__} {self.place.type} {kinds} {self.rounding()}"

    def rounding(self) -> str:
        """More of it."""
        return ""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros, so that no stale NaN can pass a masked weight. On CPU by numpy (calloc): memory is taken only as it
        is used, where torch.zeros would fill it at once."""
        if self.place.type == "cuda" or 0 in shape:
            return torch.zeros(shape, dtype=dtype, device=self.place)
        raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(raw).view(dtype).view(shape)

    def rows(self, x: Tensor, rows: NDArray[np.int32]) -> Tensor:
        return x[self.index(rows)]

    def numpy(self, x: Tensor) -> NDArray[np.float32]:
        values: NDArray[np.float32] = x.float().cpu().numpy()
        return values

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        *,
        vocab_size: int,
        token_ids: Tensor | None = None,
        keep_probs: bool = False,
    ) -> Sampled:
        drawn = sample(_wide(logits), rows, token_ids=token_ids, vocab_size=vocab_size, keep_probs=keep_probs)
        # rejection is judged on the host
        return drawn if drawn.probs is None else replace(drawn, probs=drawn.probs.cpu().numpy())

    @torch.inference_mode()
    def logprobs(self, logits: Tensor, tokens: NDArray[np.int64], num_top: int) -> list[TokenLogprob]:
        return logprobs(_wide(logits), tokens, np.full(len(tokens), num_top))

    @torch.inference_mode()
    def read_bandwidth(self, num_bytes: int, runs: int) -> float:
        buffer = torch.ones(num_bytes // 4, device=self.place)
        seconds = []
        for _ in range(runs):
            begin = time.perf_counter()
            buffer.sum().item()  # waits for the device
            seconds.append(time.perf_counter() - begin)
        return num_bytes / min(seconds)


def _tensors(pool: KVPool | StatePool | Tensor) -> list[Tensor]:
    """What a pool keeps by slots."""
    if isinstance(pool, KVPool):
        return [pool.keys] if pool.latent else [pool.keys, pool.values]
    return [pool.states if isinstance(pool, StatePool) else pool]


def _as_bytes(x: Tensor) -> NDArray[np.uint8]:
    """The memory of a tensor on the host."""
    found: NDArray[np.uint8] = x.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype == torch.bfloat16 else logits
