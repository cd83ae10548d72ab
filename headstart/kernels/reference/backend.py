"""The oracle backend: plain torch, executed op by op, on CPU or CUDA."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart import machine
from headstart.core import Sampled, SamplingRows, StepPlan, TokenLogprob
from headstart.errors import UsageError
from headstart.kernels.ops import KVSpec, Program, RawTensor
from headstart.kernels.reference.ops import KVPool, ReferenceOps, widened
from headstart.kernels.reference.recurrent import StatePool
from headstart.kernels.reference.sampling import logprobs, sample
from headstart.kernels.states import StateSpec

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class ReferenceBackend:
    """Torch tensors as buffers, weights and pools. Weights are widened to `dtype`, and all arithmetic runs in it."""

    name = "reference"

    def __init__(self, *, device: str = "cpu", dtype: str = "float32", threads: int | None = None) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device is cuda, but torch finds no CUDA GPU", "use --device cpu")
        self.device, self.dtype = torch.device(device), DTYPES[dtype]
        if threads:
            torch.set_num_threads(threads)

    @property
    def runs_on(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.device.type == "cuda" else "cpu"

    def weight(self, tensor: RawTensor, *, drafts: bool = False, precise: bool = False) -> Tensor:
        values = np.ascontiguousarray(tensor.float32())
        with warnings.catch_warnings():
            # a float32 weight may be the mapped file itself: it is read only, and nobody writes to weights
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return torch.from_numpy(values).to(self.device, self.dtype)

    def reading(self, files: Sequence[Path]) -> AbstractContextManager[None]:
        return nullcontext()

    def loaded(self) -> None:
        """Nothing is left to do."""

    def prepare(self, program: Program, *, hidden_width: int = 0) -> Program:
        """The program itself: nothing is beyond torch."""
        return program

    def kv_bytes(self, spec: KVSpec) -> int:
        values = 0 if spec.latent else spec.value_width
        return spec.num_kv_heads * (spec.head_dim + values) * self.dtype.itemsize

    def index(self, ids: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(ids).to(self.device)

    def kv_pool(self, num_slots: int, spec: KVSpec) -> KVPool:
        keys = self._zeros((num_slots, spec.num_kv_heads, spec.head_dim))
        if spec.latent:
            return KVPool(keys, keys[..., : spec.value_width])
        return KVPool(keys, self._zeros((num_slots, spec.num_kv_heads, spec.value_width)))

    def copy_rows(self, pools: Sequence[KVPool], sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        rows, places = (torch.from_numpy(each.astype(np.int64)).to(self.device) for each in (sources, targets))
        for pool in pools:  # latent values are a view of the keys: they are written twice, with the same
            pool.keys[places], pool.values[places] = pool.keys[rows], pool.values[rows]

    def hidden_bytes(self, width: int) -> int:
        return width * self.dtype.itemsize

    def hidden_pool(self, num_slots: int, width: int) -> Tensor:
        return self._zeros((num_slots, width))

    def state_bytes(self, spec: StateSpec, num_kept: int = 0) -> int:
        return (math.prod(spec.state_shape) + num_kept * spec.row_width) * self._state_dtype.itemsize

    def state_pool(self, num_slots: int, num_owned: int, num_kept: int, spec: StateSpec) -> StatePool:
        rows = self._zeros((num_owned, num_kept, spec.row_width), self._state_dtype)
        return StatePool(self._zeros((num_slots, *spec.state_shape), self._state_dtype), rows)

    @property
    def _state_dtype(self) -> torch.dtype:
        return widened(self.dtype)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Zeros, so that no stale NaN can pass a masked weight. On CPU by numpy (calloc): memory is taken only as it
        is used, where torch.zeros would fill it at once."""
        dtype = dtype or self.dtype
        if self.device.type == "cuda" or 0 in shape:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(raw).view(dtype).view(shape)

    @torch.inference_mode()
    def run(
        self, handle: Program, plan: StepPlan, *, hidden_pool: Tensor | None = None, hidden: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        ops = ReferenceOps(plan, self.device, self.dtype)
        if hidden is None and hidden_pool is not None and plan.hidden_slots is not None:
            hidden = hidden_pool[torch.from_numpy(plan.hidden_slots.astype(np.int64)).to(self.device)]
        return handle(ops, ops.inputs(hidden))

    def rows(self, x: Tensor, rows: NDArray[np.int32]) -> Tensor:
        return x[torch.from_numpy(rows.astype(np.int64)).to(self.device)]

    def numpy(self, x: Tensor) -> NDArray[np.float32]:
        values: NDArray[np.float32] = x.float().cpu().numpy()
        return values

    def prepare_chain(self, steps: object, **about: object) -> None:
        """Drafts are made step by step."""

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
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        drawn = sample(logits, rows, token_ids=token_ids, vocab_size=vocab_size, keep_probs=keep_probs)
        # rejection is judged on the host
        return drawn if drawn.probs is None else replace(drawn, probs=drawn.probs.cpu().numpy())

    @torch.inference_mode()
    def logprobs(self, logits: Tensor, tokens: NDArray[np.int64], num_top: int) -> list[TokenLogprob]:
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return logprobs(logits, tokens, np.full(len(tokens), num_top))

    def free_memory(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return machine.memory().available

    @torch.inference_mode()
    def read_bandwidth(self, num_bytes: int, runs: int) -> float:
        buffer = torch.ones(num_bytes // 4, device=self.device)
        seconds = []
        for _ in range(runs):
            begin = time.perf_counter()
            buffer.sum().item()  # waits for the device
            seconds.append(time.perf_counter() - begin)
        return num_bytes / min(seconds)
