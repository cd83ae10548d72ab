"""What a training run needs before its first step: the trunk, the text, hidden states on disk."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.engine.load import Model, load_model
from headstart.errors import UsageError
from headstart.heads.base import HeadSpec
from headstart.heads.kind import head_kind
from headstart.kernels.backend import ORACLE, choose
from headstart.kernels.ops import RawTensor
from headstart.kernels.reference.backend import ReferenceBackend
from headstart.layers.build import DecoderConfig, lm_head_name
from headstart.layers.decoder import tapped_layers
from headstart.layers.fingerprint import weights_fingerprint
from headstart.text.chat import ChatTemplate
from headstart.text.tokenizer import Tokenizer
from headstart.train.data import ChatText, Example, Problems, count_tokens, encode_records, read_records
from headstart.train.features import FeatureCache, Labeller, States, Trunk
from headstart.train.generate import answer, read_prompts
from headstart.train.native_trunk import NativeTrunk
from headstart.train.progress import note, shown
from headstart.train.shards import Shards

HELD_OUT_TOKENS = 40_000
"""What one evaluation reads at most, all kinds together."""


@dataclass(frozen=True)
class ModelText:
    """A tokenizer and its chat template, as train.data wants them."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    @property
    def end_ids(self) -> frozenset[int]:
        return self.tokenizer.eos_ids

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=False)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        if self.template is None:
            raise ValueError("the model has no chat template; only records with text can be used")
        return self.template.render(messages, add_generation_prompt)


@dataclass(frozen=True, eq=False)
class Subject:
    """The model that gets a head. `model` and `trunk` are torch's; `runner`, where there is one, is the same model on
    the native backend, which answers and labels faster and computes what will be there at run time."""

    model: Model
    trunk: Trunk
    text: ChatText
    engine_config: EngineConfig
    spec: HeadSpec
    runner: Model | None = None

    @property
    def labeller(self) -> Labeller:
        return NativeTrunk(self.runner, self.trunk.tap) if self.runner else self.trunk

    def reading(self, spec: HeadSpec) -> Subject:
        """The same, for a head of this spec: with the streams that it taps."""
        return replace(self, spec=spec, trunk=replace(self.trunk, tap=tapped_layers(spec.tap)))

    @property
    def arithmetic(self) -> str:
        """Of the hidden states, for the name of their cache."""
        return self.runner.backend.name if self.runner else str(self.trunk.dtype).removeprefix("torch.")

    def llm(self) -> LLM:
        """For answers."""
        if self.runner is None:
            return LLM(self.model, self.engine_config)
        return LLM(self.runner, replace(self.engine_config, backend=self.runner.backend.name, dtype="float32"))

    @property
    def config(self) -> DecoderConfig:
        return self.model.config

    @property
    def tensors(self) -> Mapping[str, RawTensor]:
        return self.model.weights.tensors


@dataclass(frozen=True, eq=False)
class Corpus:
    """Examples whose hidden states `cache` has, or makes. `identity` names the training examples and their order."""

    training: list[Example]
    held_out: list[Example]
    cache: States
    counts: dict[str, dict[str, int]]
    problems: list[str]

    @property
    def identity(self) -> str:
        return hashlib.sha256("".join(example.key for example in self.training).encode()).hexdigest()[:16]


def load_subject(
    name: str, threads: int | None, device: str, kind: str = "mtp", depth: int = 3, modules: int = 1
) -> Subject:
    """Read the model in the arithmetic that is fastest here. Raises ModelError or UsageError."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device is {device!r}, which is unknown", "choose cpu or cuda")
    engine_config = EngineConfig(
        backend=ORACLE,  # hidden states as torch tensors
        threads=threads,
        device=cast(Literal["cpu", "cuda"], device),
        dtype=_fastest(device),
        drafter="none",
        seed=0,
    )
    subject = subject_of(load_model(name, engine_config), engine_config, kind, depth, modules)
    native = EngineConfig(threads=threads, device=engine_config.device, drafter="none", seed=0)
    if choose(native).name == ORACLE:
        return subject
    return replace(subject, runner=load_model(name, native))


def subject_of(
    model: Model, engine_config: EngineConfig, kind: str = "mtp", depth: int = 3, modules: int = 1
) -> Subject:
    """From a model already loaded, for a kind of head, so many draft steps and, where the kind stacks, modules."""
    exact = "float64" if engine_config.dtype == "float64" else "float32"
    head_name = lm_head_name(model.weights, model.config)
    raw = model.weights.raw(head_name, (model.config.vocab_size, model.config.hidden_size))
    device = "cuda" if engine_config.device == "cuda" else "cpu"
    lm_head: Tensor = ReferenceBackend(device=device, dtype=exact).weight(raw)
    text = ModelText(model.tokenizer, model.checkpoint.chat_template())
    made = head_kind(kind)
    assert made.training is not None
    spec = made.training.spec(model.config.num_layers, depth)
    if made.block:
        spec = replace(spec, layer=made.training.layer(model.config.head_layer))
    if modules > 1:
        spec = replace(spec, num_modules=modules, beyond="last")
    return Subject(model, Trunk(model.decoder, lm_head, tapped_layers(spec.tap)), text, engine_config, spec)


def _fastest(device: str) -> Literal["float32", "bfloat16"]:
    """bfloat16 where the processor has instructions for it: the quickest of a few matrix products tells, whatever else
    runs there; of the second form too, which gradients are made with."""
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # what stays in float32, the teacher's logits, on tensor cores
        return "bfloat16"
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(256, 1024, dtype=dtype)
        w = torch.ones(1024, 1024, dtype=dtype)
        seconds[dtype] = sum(min(_seconds(x, matrix) for _ in range(4)) for matrix in (w.T, w))
    return "bfloat16" if seconds[torch.bfloat16] < seconds[torch.float32] else "float32"


def _seconds(x: Tensor, w: Tensor) -> float:
    started = time.perf_counter()
    x @ w
    return time.perf_counter() - started


def write_answers(subject: Subject, prompts: Sequence[Path], folder: Path, seed: int) -> None:
    """Have the model answer the prompts that the shards in `folder` do not hold yet."""
    given = read_prompts(prompts)
    finished = tokens = 0
    started = time.monotonic()
    with shown("answering prompts") as show:

        def done(record: dict[str, Any]) -> None:
            nonlocal finished, tokens
            finished, tokens = finished + 1, tokens + len(record["response_ids"])
            rate = tokens / (time.monotonic() - started)
            show(finished / len(given), f"{tokens:,} tokens, {rate:.0f} tok/s")

        with Shards(folder, "answers") as shards:
            answer(subject.llm(), given, shards, seed=seed, done=done)


def prepare(
    subject: Subject,
    files: Sequence[Path],
    work: Path,
    seed: int,
    label_seconds: float | None,
    max_tokens: int | None,
) -> Corpus:
    """Read, encode, split, and compute hidden states: of all data, or of as much of a random mix as `label_seconds`
    or `max_tokens` allow. What an earlier run has computed is always used."""
    problems = Problems()
    examples = encode_records(read_records(files, problems), subject.text, problems)
    for line in problems.lines():
        note(line)
    order = np.random.default_rng(seed).permutation(len(examples))
    examples = [examples[i] for i in order]
    held_out, training = _split(examples)
    if max_tokens is not None:
        training = _up_to(training, max_tokens)
    cache: States = subject.trunk
    if subject.engine_config.device != "cuda":  # a GPU is faster at making hidden states than a disk at keeping them
        cache = _labelled(subject, training, held_out, work, label_seconds)
        training = [example for example in training if example.key in cache]
    counts = count_tokens(training)
    for kind, row in counts.items():
        note(f"{kind}: {row['sequences']} sequences, {row['tokens']:,} tokens, loss on {row['loss']:,}")
    return Corpus(training, held_out, cache, counts, problems.lines())


def _labelled(
    subject: Subject, training: list[Example], held_out: list[Example], work: Path, label_seconds: float | None
) -> FeatureCache:
    """Hidden states on disk: of all that is held out, and of as much of the rest as the time allows."""
    name, tap = f"cache-{weights_fingerprint(subject.tensors)}-{subject.arithmetic}", subject.trunk.tap
    name += "".join(f"-{layer}" for layer in tap)
    cache = FeatureCache(work / name, subject.config.hidden_size, len(tap))
    labeller = subject.labeller
    _label(cache, labeller, held_out, None)
    _label(cache, labeller, training, label_seconds)
    return cache


def _split(examples: list[Example]) -> tuple[list[Example], list[Example]]:
    """Held out, training. Few records may have none held out by hash: then one in ten is."""
    held_out = [example for example in examples if example.held_out]
    training = [example for example in examples if not example.held_out]
    if not held_out:
        held_out, training = training[: -(-len(training) // 10)], training[-(-len(training) // 10) :]
    if not training:
        raise UsageError("one record is not enough to train and to evaluate", "add data")
    return _up_to(held_out, HELD_OUT_TOKENS), training


def _up_to(examples: list[Example], max_tokens: int) -> list[Example]:
    ends = np.cumsum([len(example) for example in examples])
    return examples[: max(1, int(np.searchsorted(ends, max_tokens, side="right")))]


def _label(cache: FeatureCache, trunk: Labeller, examples: list[Example], seconds: float | None) -> None:
    missing = [example for example in examples if example.key not in cache]
    if not missing:
        return
    total, finished, started = sum(map(len, missing)), 0, time.monotonic()
    with shown("hidden states") as show:
        for tokens in cache.fill(missing, trunk):
            finished += tokens
            spent = time.monotonic() - started
            share = finished / total if seconds is None else max(finished / total, spent / seconds)
            show(min(share, 1.0), f"{finished:,} tokens, {finished / spent:.0f} tok/s")
            if seconds is not None and spent > seconds:
                break
