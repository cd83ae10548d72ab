"""The GPU backend: Triton's kernels over torch tensors. torch only allocates, copies and owns streams.

A row's bits depend on that row alone (see kernels/): fixed tiles for any number of rows, parts joined in order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.config import Quantization
from headstart.core import Sampled, SamplingRows, StepPlan, TokenLogprob
from headstart.kernels.cuda.angles import Angles
from headstart.kernels.cuda.device import Device, open_device, said
from headstart.kernels.cuda.launch import Launcher
from headstart.kernels.cuda.matrix import Matrix, to_device
from headstart.kernels.cuda.ops import CudaOps, Probe
from headstart.kernels.cuda.plan import DevicePlan, Shape
from headstart.kernels.cuda.pools import KVPool, StatePool
from headstart.kernels.ops import KVSpec, Ops, Program, RawTensor, StepInputs
from headstart.kernels.reference.sampling import logprobs, sample
from headstart.kernels.states import StateSpec


@dataclass(frozen=True, eq=False)
class Handle:
    """A program that the kernels can run."""

    program: Program


class CudaBackend:
    """Weights in the file's precision (or quantized), activations float32. `narrow`: keys and values are bfloat16, and
    what meets them or a matrix is rounded to it, for tensor cores; else all is float32."""

    name = "cuda"

    def __init__(
        self,
        *,
        narrow: bool = True,
        quantization: Quantization | None = None,
        device: Device | None = None,
    ) -> None:
        self.device = device or open_device()
        self.quantization: Quantization | None = quantization
        self.launcher = Launcher(self.device, narrow=narrow)
        self.angles = Angles(self.device.place)
        self._store = torch.bfloat16 if narrow else torch.float32
        self.weight_bytes = 0

    def weight(self, tensor: RawTensor, *, drafts: bool = False, precise: bool = False) -> Matrix | Tensor:
        if len(tensor.shape) == 1:
            return torch.from_numpy(np.array(tensor.float32(), np.float32)).to(self.device.place)
        matrix = to_device(tensor, self.device, None if precise else self.quantization)
        if not drafts:
            self.weight_bytes += matrix.num_bytes
        return matrix

    def reading(self, files: Sequence[Path]) -> AbstractContextManager[None]:
        return nullcontext()

    def loaded(self) -> None:
        """Nothing is left to do."""

    def prepare(self, program: Program, *, hidden_width: int = 0) -> Handle:
        program(cast(Ops, Probe()), StepInputs(None, None, None, None))
        return Handle(program)

    def kv_bytes(self, spec: KVSpec) -> int:
        values = 0 if spec.latent else spec.value_width
        return spec.num_kv_heads * (spec.head_dim + values) * self._store.itemsize

    def index(self, ids: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids, np.int64)).to(self.device.place)

    def kv_pool(self, num_slots: int, spec: KVSpec) -> KVPool:
        keys = self._zeros((num_slots, spec.num_kv_heads, spec.head_dim), self._store)
        if spec.latent:
            return KVPool(keys, keys[..., : spec.value_width], latent=True)
        return KVPool(keys, self._zeros((num_slots, spec.num_kv_heads, spec.value_width), self._store))

    def copy_rows(self, pools: Sequence[KVPool], sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        rows, places = (self.index(each.astype(np.int64)) for each in (sources, targets))
        for pool in pools:
            pool.keys[places] = pool.keys[rows]
            if not pool.latent:
                pool.values[places] = pool.values[rows]

    def hidden_bytes(self, width: int) -> int:
        return 4 * width

    def hidden_pool(self, num_slots: int, width: int) -> Tensor:
        return self._zeros((num_slots, width), torch.float32)

    def state_bytes(self, spec: StateSpec, num_kept: int = 0) -> int:
        return 4 * (math.prod(spec.state_shape) + num_kept * spec.row_width)

    def state_pool(self, num_slots: int, num_owned: int, num_kept: int, spec: StateSpec) -> StatePool:
        rows = self._zeros((num_owned, num_kept, spec.row_width), torch.float32)
        return StatePool(self._zeros((num_slots, *spec.state_shape), torch.float32), rows)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros: what was never written is multiplied by weights of 0."""
        if self.device.is_gpu or 0 in shape:
            return self.device.zeros(shape, dtype, "keys, values and states")
        raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)  # takes memory only as it is used
        zeros: Tensor = torch.from_numpy(raw).view(dtype).view(shape)
        return zeros

    @property
    def runs_on(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.device.is_gpu else "cpu"

    @torch.inference_mode()
    def run(
        self, handle: Handle, plan: StepPlan, *, hidden_pool: Tensor | None = None, hidden: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        shape = Shape.of(plan)
        self.angles.cover(int(plan.positions.max()))
        rows = DevicePlan(shape, self.device.place, plan)
        if hidden is not None:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, shape.rows - len(hidden)))
        elif hidden_pool is not None and plan.hidden_slots is not None:
            hidden = hidden_pool.index_select(0, rows["hidden_slots"])
        with said("a pass"):
            ops = CudaOps(self.launcher, rows, self.angles)
            made = handle.program(cast(Ops, ops), ops.inputs(hidden))
        return {name: x[: plan.num_rows] for name, x in made.items()}  # no more rows than these have logits

    def rows(self, x: Tensor, rows: NDArray[np.int32]) -> Tensor:
        return x[self.index(rows.astype(np.int64))]

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
        drawn = sample(logits, rows, token_ids=token_ids, vocab_size=vocab_size, keep_probs=keep_probs)
        # rejection is judged on the host
        return drawn if drawn.probs is None else replace(drawn, probs=drawn.probs.cpu().numpy())

    @torch.inference_mode()
    def logprobs(self, logits: Tensor, tokens: NDArray[np.int64], num_top: int) -> list[TokenLogprob]:
        return logprobs(logits, tokens, np.full(len(tokens), num_top))

    def free_memory(self) -> int:
        return self.device.free_memory()

    @torch.inference_mode()
    def read_bandwidth(self, num_bytes: int, runs: int) -> float:
        buffer = torch.ones(num_bytes // 4, device=self.device.place)
        seconds = []
        for _ in range(runs):
            begin = time.perf_counter()
            buffer.sum().item()  # waits for the device
            seconds.append(time.perf_counter() - begin)
        return num_bytes / min(seconds)
