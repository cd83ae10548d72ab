"""The model that gets a head: its frozen trunk in torch and on the native backend, and its text side."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from headstart.api import LLM
from headstart.config import EngineConfig, one_adapter
from headstart.engine.load import Model, load_model
from headstart.errors import UsageError
from headstart.formats.adapter import AdapterFile
from headstart.heads.base import HeadSpec
from headstart.heads.kind import new_head_spec
from headstart.kernels.backend import ORACLE, select_backend
from headstart.kernels.ops import RawTensor
from headstart.kernels.reference.backend import ReferenceBackend
from headstart.layers.build import DecoderConfig, lm_head_tensor
from headstart.layers.decoder import tapped_layers
from headstart.train.hidden_states import FeatureExtractor, NativeTrunk, TorchTrunk
from headstart.train.options import TrainOptions
from headstart.train.records import ChatTokenizer


@dataclass(frozen=True, eq=False)
class FrozenModel:
    """A loaded model and the spec of the head that it gets."""

    model: Model  # on the torch backend
    trunk: TorchTrunk
    text: ChatTokenizer
    engine_config: EngineConfig
    spec: HeadSpec
    native_model: Model | None = None  # the same model on the native backend: faster, and the arithmetic of run time
    lora: AdapterFile | None = None  # LoRA adapter of the model; the native backend computes it

    def feature_extractor(self) -> FeatureExtractor:
        """The trunk that computes hidden states for the cache: native if there is one, else torch."""
        return NativeTrunk(self.native_model, self.trunk.tap, self.lora) if self.native_model else self.trunk

    def with_spec(self, spec: HeadSpec) -> "FrozenModel":
        """The same model for another head spec, with the streams that this head taps."""
        return replace(self, spec=spec, trunk=replace(self.trunk, tap=tapped_layers(spec.tap)))

    @property
    def arithmetic(self) -> str:
        """Arithmetic of the hidden states, with the digest of the adapter; part of the cache's name."""
        if self.native_model is None:
            return str(self.trunk.dtype).removeprefix("torch.")
        return "-".join([self.native_model.backend.name, *([self.lora.digest] if self.lora else [])])

    def llm(self) -> LLM:
        """An engine that writes answers."""
        native = self.native_model
        if native is None:
            return LLM(self.model, self.engine_config)
        return LLM(native, replace(self.engine_config, backend=native.backend.name, dtype="float32"))

    @property
    def answers(self) -> str:
        """Name of the folder for answers to prompts; each adapter has its own."""
        return f"answers-{self.lora.digest}" if self.lora else "answers"

    @property
    def config(self) -> DecoderConfig:
        return self.model.config

    @property
    def tensors(self) -> Mapping[str, RawTensor]:
        return self.model.weights.tensors


def load_frozen_model(options: TrainOptions) -> FrozenModel:
    """Load the model in the arithmetic that is fastest on this machine. Raises ModelError or UsageError."""
    engine_config = EngineConfig(
        backend=ORACLE,  # hidden states as torch tensors
        threads=options.threads,
        device=options.device,
        dtype=_fastest_dtype(options.device),
        drafter="none",
        seed=0,
        lora=one_adapter(options.lora),
    )
    model = load_model(options.model, engine_config)
    frozen_model = make_frozen_model(model, engine_config, options.kind, options.steps, options.modules)
    native = EngineConfig(threads=options.threads, device=options.device, drafter="none", seed=0)
    if select_backend(native).name != ORACLE:
        return replace(frozen_model, native_model=load_model(options.model, native), lora=options.adapter)
    if options.lora is not None:
        raise UsageError("--lora needs the native backend, which does not run here", "use another machine")
    return frozen_model


def make_frozen_model(
    model: Model, engine_config: EngineConfig, kind: str = "mtp", depth: int = 3, modules: int = 1
) -> FrozenModel:
    """The FrozenModel of a loaded model, for a kind of head, draft steps and (for kinds that stack) modules."""
    exact = "float64" if engine_config.dtype == "float64" else "float32"
    head_name = lm_head_tensor(model.weights, model.config)
    raw = model.weights.raw(head_name, (model.config.vocab_size, model.config.hidden_size))
    device = "cuda" if engine_config.device == "cuda" else "cpu"
    lm_head: Tensor = ReferenceBackend(device=device, dtype=exact).weight(raw)
    text = ChatTokenizer(model.tokenizer, model.checkpoint.chat_template(), model.config.vocab_size)
    spec = new_head_spec(kind, model.config, depth, modules)
    return FrozenModel(model, TorchTrunk(model.decoder, lm_head, tapped_layers(spec.tap)), text, engine_config, spec)


@cache
def _fastest_dtype(device: str) -> Literal["float32", "bfloat16"]:
    """bfloat16 where the processor has instructions for it, found by timing a few matrix products in both orders
    (the second one occurs in gradients). The minimum is robust against other processes."""
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # float32 products (the teacher's logits) run on tensor cores
        return "bfloat16"
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(128, 512, dtype=dtype)
        w = torch.ones(512, 512, dtype=dtype)
        seconds[dtype] = sum(min(_matmul_seconds(x, matrix) for _ in range(4)) for matrix in (w.T, w))
    return "bfloat16" if seconds[torch.bfloat16] < seconds[torch.float32] else "float32"


def _matmul_seconds(x: Tensor, w: Tensor) -> float:
    started = time.perf_counter()
    x @ w
    return time.perf_counter() - started
