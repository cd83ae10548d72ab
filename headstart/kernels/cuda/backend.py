"""The GPU backend: Triton's kernels over torch tensors. torch only allocates, copies and owns streams.

A row's bits depend on that row alone (see kernels/): fixed tiles for any number of rows, parts joined in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import triton
from torch import Tensor

from headstart.config import Quantization
from headstart.core import NOT_FINITE, NOTHING_LEFT, Sampled, SamplingRows, StepPlan
from headstart.kernels.cuda.arrival import Arrival
from headstart.kernels.cuda.chain import CudaChain
from headstart.kernels.cuda.device import Device, open_device, said
from headstart.kernels.cuda.launch import Launcher
from headstart.kernels.cuda.matrix import Matrix, to_device
from headstart.kernels.cuda.ops import Probe
from headstart.kernels.cuda.recording import Handle, Recorder
from headstart.kernels.cuda.sampling import DrawRows, Sampler
from headstart.kernels.ops import Ops, Program, RawTensor, StepInputs
from headstart.kernels.reference.sampling import asked
from headstart.kernels.torch_backend import TorchBackend

_REASONS = {-1: NOTHING_LEFT, -2: NOT_FINITE}
"""As kernels/sampling.py has them."""


@dataclass(frozen=True, eq=False)
class CudaDrawn:
    """`Drawn`: tokens [L, 1] of rows of logits."""

    tokens: Tensor
    arrival: Arrival
    logits: Tensor
    rows: SamplingRows
    token_ids: Tensor | None

    @torch.inference_mode()
    def wait(self) -> Sampled:
        tokens = self.arrival.numpy()[:, 0]
        failures = {row: _REASONS[token] for row, token in enumerate(tokens.tolist()) if token < 0}
        tokens = np.maximum(tokens, -1)
        return Sampled(tokens, asked(self.logits, self.rows, tokens, self.token_ids), None, failures)


class CudaBackend(TorchBackend):
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
        self.place = self.device.place
        self.kept = torch.bfloat16 if narrow else torch.float32
        self.hidden = self.summed = torch.float32
        self.quantization: Quantization | None = quantization
        self.launcher = Launcher(self.device, narrow=narrow)
        self.recorder, self.sampler = Recorder(self.device, self.launcher), Sampler(self.launcher)
        self.weight_bytes = 0

    def weight(self, tensor: RawTensor, *, drafts: bool = False, precise: bool = False) -> Matrix | Tensor:
        if len(tensor.shape) == 1:
            return torch.from_numpy(np.array(tensor.float32(), np.float32)).to(self.place)
        matrix = to_device(tensor, self.device, None if precise else self.quantization)
        if not drafts:
            self.weight_bytes += matrix.num_bytes
        return matrix

    def prepare(self, program: Program, *, hidden_width: int = 0) -> Handle:
        program(cast(Ops, Probe()), StepInputs(None, None, None, None))
        return Handle(program)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with said("keys, values and states"):
            return super().zeros(shape, dtype)

    @torch.inference_mode()
    def run(
        self, handle: Handle, plan: StepPlan, *, hidden_pool: Tensor | None = None, hidden: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        return self.recorder.run(handle, plan, hidden_pool, hidden)

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
        if keep_probs:
            return super().sample(logits, rows, vocab_size=vocab_size, token_ids=token_ids, keep_probs=True)
        return self._draw(logits, rows, vocab_size, token_ids).wait()

    @torch.inference_mode()
    def begin_sample(self, logits: Tensor, rows: SamplingRows, *, vocab_size: int) -> CudaDrawn:
        return self._draw(logits, rows, vocab_size, None)

    def _draw(self, logits: Tensor, rows: SamplingRows, vocab_size: int, token_ids: Tensor | None) -> CudaDrawn:
        if token_ids is None:
            logits = logits[:, :vocab_size]
        drawn = self.recorder.drawn(self.sampler, logits, rows) if token_ids is None else None
        if drawn is None:
            drawn = torch.empty((len(rows), 1), dtype=torch.int64, device=self.place)
            self.sampler.draw(logits, DrawRows.of(rows, self.place), token_ids, drawn)
        return CudaDrawn(drawn, Arrival(drawn), logits, rows, token_ids)

    def prepare_chain(
        self,
        steps: Sequence[tuple[Handle, int]],
        *,
        vocab_size: int,
        token_ids: Tensor | None = None,
        rows_given: bool = False,
    ) -> CudaChain:
        return CudaChain(
            self.recorder, self.sampler, steps, vocab_size=vocab_size, token_ids=token_ids, rows_given=rows_given
        )

    def rounding(self) -> str:
        device = torch.cuda.get_device_name(self.place) if self.place.type == "cuda" else "interpreter"
        return f"{triton.__version__} {device} {self.quantization}"

    def free_memory(self) -> int:
        return self.device.free_memory()
