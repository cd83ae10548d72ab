"""The GPU backend: Triton kernels over torch tensors; torch only allocates, copies and owns streams.

The bits of a row depend on that row alone: tiles do not depend on the number of rows, and parts are summed in order.
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
from headstart.kernels.cuda.device import HostCopy, explain_out_of_memory, open_device
from headstart.kernels.cuda.draft_loop import CudaDraftLoop
from headstart.kernels.cuda.launch import KernelLauncher
from headstart.kernels.cuda.matrix import CudaMatrix, load_matrix
from headstart.kernels.cuda.ops import SupportCheck
from headstart.kernels.cuda.recording import CudaProgram, GraphRecorder
from headstart.kernels.cuda.sampling import CudaSampler, DeviceSamplingRows
from headstart.kernels.ops import Ops, Program, RawTensor, StepInputs
from headstart.kernels.reference.sampling import requested_logprobs
from headstart.kernels.torch_backend import TorchBackend

_REASONS = {-1: NOTHING_LEFT, -2: NOT_FINITE}  # error codes of kernels/sampling.py


@dataclass(frozen=True, eq=False)
class CudaPendingSample:
    """`PendingSample` of rows of logits."""

    tokens: Tensor  # [L, 1]
    host_copy: HostCopy
    logits: Tensor
    rows: SamplingRows
    token_ids: Tensor | None

    @torch.inference_mode()
    def wait(self) -> Sampled:
        tokens = self.host_copy.numpy()[:, 0]
        failures = {row: _REASONS[token] for row, token in enumerate(tokens.tolist()) if token < 0}
        tokens = np.maximum(tokens, -1)
        return Sampled(tokens, requested_logprobs(self.logits, self.rows, tokens, self.token_ids), None, failures)


class CudaBackend(TorchBackend):
    """Weights in the file's precision or quantized; activations float32.

    narrow: keys and values are bfloat16, and inputs of products are rounded to bfloat16 for tensor cores; else all is
    float32."""

    name = "cuda"

    def __init__(self, *, narrow: bool = True, quantization: Quantization | None = None) -> None:
        self.device = open_device()
        self.torch_device = self.device.torch_device
        self.kv_dtype = torch.bfloat16 if narrow else torch.float32
        self.hidden_dtype = self.state_dtype = torch.float32
        self.quantization: Quantization | None = quantization
        self.launcher = KernelLauncher(self.device, narrow=narrow)
        self.recorder, self.sampler = GraphRecorder(self.device, self.launcher), CudaSampler(self.launcher)
        self.weight_bytes = 0

    def weight(self, tensor: RawTensor, *, drafts: bool = False, precise: bool = False) -> CudaMatrix | Tensor:
        if len(tensor.shape) == 1:
            return torch.from_numpy(np.array(tensor.float32(), np.float32)).to(self.torch_device)
        matrix = load_matrix(tensor, self.device, None if precise else self.quantization)
        if not drafts:
            self.weight_bytes += matrix.num_bytes
        return matrix

    def prepare(self, program: Program, *, hidden_width: int = 0) -> CudaProgram:
        program(cast(Ops, SupportCheck()), StepInputs("token_ids", "positions", "logit_rows"))
        return CudaProgram(program)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with explain_out_of_memory("keys, values and states"):
            return super().zeros(shape, dtype)

    @torch.inference_mode()
    def run(
        self, handle: CudaProgram, plan: StepPlan, *, hidden_pool: Tensor | None = None, hidden: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        return self.recorder.run(handle, plan, hidden_pool, hidden)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: SamplingRows, *, vocab_size: int, token_ids: Tensor | None = None,
        keep_probs: bool = False,
    ) -> Sampled:  # fmt: skip
        if keep_probs:
            return super().sample(logits, rows, vocab_size=vocab_size, token_ids=token_ids, keep_probs=True)
        return self.start_sample(logits, rows, vocab_size=vocab_size, token_ids=token_ids).wait()

    @torch.inference_mode()
    def start_sample(
        self, logits: Tensor, rows: SamplingRows, *, vocab_size: int, token_ids: Tensor | None = None
    ) -> CudaPendingSample:
        """See AsyncSampler.start_sample. token_ids: as in Backend.sample."""
        if token_ids is None:
            logits = logits[:, :vocab_size]
        tokens = self.recorder.sample(self.sampler, logits, rows) if token_ids is None else None
        if tokens is None:
            tokens = torch.empty((len(rows), 1), dtype=torch.int64, device=self.torch_device)
            self.sampler.draw(logits, DeviceSamplingRows.of(rows, self.torch_device), token_ids, tokens)
        return CudaPendingSample(tokens, HostCopy(tokens), logits, rows, token_ids)

    def prepare_draft_loop(
        self, steps: Sequence[tuple[CudaProgram, int]], *, vocab_size: int, token_ids: Tensor | None = None,
        is_block: bool = False,
    ) -> CudaDraftLoop:  # fmt: skip
        return CudaDraftLoop(
            self.recorder, self.sampler, steps, vocab_size=vocab_size, token_ids=token_ids, is_block=is_block
        )

    def rounding(self) -> str:
        device = torch.cuda.get_device_name(self.torch_device) if self.torch_device.type == "cuda" else "interpreter"
        return f"{triton.__version__} {device} {self.quantization}"

    def free_memory(self) -> int:
        return self.device.free_memory()
