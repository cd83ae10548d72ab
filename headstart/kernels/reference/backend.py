"""The reference backend: plain torch, executed op by op, on CPU or CUDA."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart import machine
from headstart.core import LoraFactors, StepPlan
from headstart.errors import UsageError
from headstart.kernels.ops import Program, RawTensor
from headstart.kernels.reference.ops import ReferenceOps, widened
from headstart.kernels.torch_backend import TorchBackend
from headstart.wording import option

ALIGNMENT = 64  # bytes, of weights in memory, as of tensors that torch allocates
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class ReferenceBackend(TorchBackend):
    """Buffers, weights and pools are torch tensors of `dtype`, in which all arithmetic runs."""

    name = "reference"

    def __init__(self, *, device: str = "cpu", dtype: str = "float32", threads: int | None = None) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device is cuda, but torch finds no CUDA GPU", "use " + option("device", "cpu"))
        self.torch_device, self.dtype = torch.device(device), DTYPES[dtype]
        self.kv_dtype = self.hidden_dtype = self.dtype
        self.state_dtype = widened(self.dtype)
        if threads:
            torch.set_num_threads(threads)

    def weight(self, tensor: RawTensor, *, drafts: bool = False, precise: bool = False) -> Tensor:
        values = np.ascontiguousarray(tensor.float32())
        with warnings.catch_warnings():
            # a float32 weight may be the mapped, read-only file; weights are never written
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            weight = torch.from_numpy(values).to(self.torch_device, self.dtype)
        # sums of torch's matrix products depend on the alignment, which a mapped file and numpy do not keep
        return weight if weight.data_ptr() % ALIGNMENT == 0 else weight.clone()

    def prepare(self, program: Program, *, hidden_width: int = 0) -> Program:
        """The program itself: torch runs every op."""
        return program

    def lora_table(
        self, num_in: int, num_out: int, factors: Sequence[LoraFactors | None]
    ) -> Sequence[tuple[Tensor, Tensor] | None]:
        def held(values: NDArray[np.float32]) -> Tensor:
            return torch.from_numpy(values).to(self.torch_device, self.dtype)

        return [each and (held(each.a), held(each.b)) for each in factors]

    def prepare_draft_loop(self, steps: object, **about: object) -> None:
        """None: this backend drafts step by step."""

    @torch.inference_mode()
    def run(
        self, handle: Program, plan: StepPlan, *, hidden_pool: Tensor | None = None, hidden: Tensor | None = None
    ) -> Mapping[str, Tensor]:
        ops = ReferenceOps(plan, self.torch_device, self.dtype)
        if hidden is None and hidden_pool is not None and plan.hidden_slots is not None:
            hidden = hidden_pool[self.index(plan.hidden_slots)]
        return handle(ops, ops.inputs(hidden))

    def rounding(self) -> str:
        return f"{torch.get_num_threads()} threads"  # they decide the order of sums

    def free_memory(self) -> int:
        if self.torch_device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.torch_device)[0])
        return machine.memory().available
