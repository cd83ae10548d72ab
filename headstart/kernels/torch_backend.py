"""Base of the backends over torch tensors: pools, copies between slots, sampling on the host."""

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
from headstart.kernels.specs import StateSpec


@dataclass(frozen=True, eq=False)
class TorchKVPool:
    """Keys and values of one layer by slot."""

    keys: Tensor  # [slots, K, D]
    values: Tensor  # [slots, K, V]; latent: a view of the keys
    latent: bool = False


@dataclass(frozen=True, eq=False)
class TorchStatePool:
    """Recurrent states of one layer by slot."""

    states: Tensor  # [slots, *state_shape]
    rows: Tensor  # [owned, kept, W] inputs after each sequence's state; row j is of position keeps + j


class TorchBackend:
    """The part of `Backend` that does not depend on how a program runs."""

    name: str
    draws_leaves = False
    torch_device: torch.device
    kv_dtype: torch.dtype  # of keys and values
    hidden_dtype: torch.dtype  # of hidden states
    state_dtype: torch.dtype  # of recurrent states

    @property
    def runs_on(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.torch_device.type == "cuda" else "cpu"

    def reading(self, files: Sequence[Path]) -> AbstractContextManager[None]:
        return nullcontext()

    def loaded(self, *, partly: bool = False) -> None:
        """Nothing to do."""

    def index(self, ids: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids, np.int64)).to(self.torch_device)

    def kv_bytes(self, spec: KVSpec) -> int:
        values = 0 if spec.latent else spec.value_width
        return spec.num_kv_heads * (spec.head_dim + values) * self.kv_dtype.itemsize

    def kv_pool(self, num_slots: int, spec: KVSpec) -> TorchKVPool:
        keys = self.zeros((num_slots, spec.num_kv_heads, spec.head_dim), self.kv_dtype)
        if spec.latent:
            return TorchKVPool(keys, keys[..., : spec.value_width], latent=True)
        return TorchKVPool(keys, self.zeros((num_slots, spec.num_kv_heads, spec.value_width), self.kv_dtype))

    def copy_rows(self, pools: Sequence[TorchKVPool], sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        from_slots, to_slots = self.index(sources), self.index(targets)
        for pool in pools:
            pool.keys[to_slots] = pool.keys[from_slots]
            if not pool.latent:
                pool.values[to_slots] = pool.values[from_slots]

    def hidden_bytes(self, width: int) -> int:
        return width * self.hidden_dtype.itemsize

    def hidden_pool(self, num_slots: int, width: int) -> Tensor:
        return self.zeros((num_slots, width), self.hidden_dtype)

    def state_bytes(self, spec: StateSpec, num_kept: int = 0) -> int:
        return (math.prod(spec.state_shape) + num_kept * spec.row_width) * self.state_dtype.itemsize

    def state_pool(self, num_slots: int, num_owned: int, num_kept: int, spec: StateSpec) -> TorchStatePool:
        rows = self.zeros((num_owned, num_kept, spec.row_width), self.state_dtype)
        return TorchStatePool(self.zeros((num_slots, *spec.state_shape), self.state_dtype), rows)

    @torch.inference_mode()
    def read_slots(self, pool: TorchKVPool | TorchStatePool | Tensor, first: int, count: int) -> NDArray[np.uint8]:
        rows = [_as_bytes(each[first : first + count].cpu()) for each in _tensors(pool)]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    @torch.inference_mode()
    def write_slots(self, pool: TorchKVPool | TorchStatePool | Tensor, first: int, content: NDArray[np.uint8]) -> None:
        tensors = _tensors(pool)
        count = len(content) // sum(each[0].nbytes for each in tensors)
        for each in tensors:
            rows = torch.empty((count, *each.shape[1:]), dtype=each.dtype)
            _as_bytes(rows)[:] = content[: rows.nbytes]
            each[first : first + count] = rows.to(self.torch_device)
            content = content[rows.nbytes :]

    def fingerprint(self) -> str:
        kinds = f"{self.kv_dtype} {self.hidden_dtype} {self.state_dtype}"
        return f"{self.name} {torch.__version__} {self.torch_device.type} {kinds} {self.rounding()}"

    def rounding(self) -> str:
        """Names of everything that the rounding of results depends on, for `fingerprint`."""
        return ""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros: a stale NaN would survive a masked weight of 0. On the CPU by numpy (calloc), which takes
        memory only as it is used; torch.zeros fills it at once."""
        if self.torch_device.type == "cuda" or 0 in shape:
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)
        raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(raw).view(dtype).view(shape)

    def rows(self, x: Tensor, rows: NDArray[np.int32]) -> Tensor:
        return x[self.index(rows)]

    @torch.inference_mode()
    def buffer(self, values: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(self.torch_device, self.hidden_dtype)

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
        sampled = sample(_wide(logits), rows, token_ids=token_ids, vocab_size=vocab_size, keep_probs=keep_probs)
        # rejection sampling runs on the host
        return sampled if sampled.probs is None else replace(sampled, probs=sampled.probs.cpu().numpy())

    @torch.inference_mode()
    def logprobs(self, logits: Tensor, tokens: NDArray[np.int64], num_top: int) -> list[TokenLogprob]:
        return logprobs(_wide(logits), tokens, np.full(len(tokens), num_top))

    @torch.inference_mode()
    def read_bandwidth(self, num_bytes: int, runs: int) -> float:
        buffer = torch.ones(num_bytes // 4, device=self.torch_device)
        seconds = []
        for _ in range(runs):
            begin = time.perf_counter()
            buffer.sum().item()  # waits for the device
            seconds.append(time.perf_counter() - begin)
        return num_bytes / min(seconds)


def _tensors(pool: TorchKVPool | TorchStatePool | Tensor) -> list[Tensor]:
    """The tensors of a pool whose first dimension is the slot."""
    if isinstance(pool, TorchKVPool):
        return [pool.keys] if pool.latent else [pool.keys, pool.values]
    return [pool.states if isinstance(pool, TorchStatePool) else pool]


def _as_bytes(x: Tensor) -> NDArray[np.uint8]:
    """The memory of a host tensor, uint8 [bytes]."""
    memory: NDArray[np.uint8] = x.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memory


def _wide(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype == torch.bfloat16 else logits
