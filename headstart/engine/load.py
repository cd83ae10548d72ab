"""From a model's name to a running engine: checkpoint, family, backend, weights, head, pools."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart import hub, machine, registry
from headstart.cache.memory import KVMemory
from headstart.cache.recurrent import StateMemory
from headstart.config import AUTO, MAX_DEPTH, EngineConfig
from headstart.core import Progress, no_progress
from headstart.drafters._drafter import AttachedHead, Drafter, Target
from headstart.engine.engine import Engine
from headstart.engine.runner import Runner
from headstart.errors import ModelError, UsageError
from headstart.formats import open_checkpoint
from headstart.formats.base import Checkpoint
from headstart.formats.head import BlockConfig, is_head, read_head
from headstart.formats.quantization import readable
from headstart.formats.rows import unpermute_rows
from headstart.kernels.backend import choose, open_backend
from headstart.kernels.ops import Backend, RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig, eagle3_head, medusa_modules, mtp_module
from headstart.layers.decoder import Decoder, LayerConfig, tap_width
from headstart.layers.mlp import MLPConfig
from headstart.layers.mtp import HeadSpec, MTPHead
from headstart.layers.weights import Weights
from headstart.models.base import Family, family_named, native_head
from headstart.models.names import trailing_modules
from headstart.text.tokenizer import Tokenizer

MEMORY_SHARE = 0.25
"""Share of the free memory that the KV cache may take when --kv-blocks is not given; half of it where there is
recurrent state, a quarter of it each for sequences and snapshots."""
MOST_SNAPSHOTS = 256


@dataclass(frozen=True)
class Model:
    """A loaded trunk: everything that does not depend on how it is run."""

    name: str
    checkpoint: Checkpoint
    family: Family
    config: DecoderConfig
    backend: Backend
    weights: Weights
    decoder: Decoder
    tokenizer: Tokenizer
    head: AttachedHead | None


NATIVE_HEAD = "the checkpoint"
"""AttachedHead.source of a head inside the trunk's own files."""


def find_family(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint by its model_type. Raises ModelError for one that is not known."""
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{checkpoint.path}: config.json names no model_type")
    return family_named(model_type)


def canonical_tensors(checkpoint: Checkpoint, family: Family, config: DecoderConfig) -> Mapping[str, RawTensor]:
    """The checkpoint's tensors under canonical names, q and k rows in the half-split rope order."""
    read = readable(checkpoint.tensors, checkpoint.config)
    tensors: dict[str, RawTensor] = {**read}
    if not checkpoint.canonical_names:
        named = ((family.names.canonical(name), tensor) for name, tensor in read.items())
        tensors = {name: tensor for name, tensor in named if name is not None}
    if family.adapt:
        tensors = family.adapt(tensors, config, checkpoint.canonical_names)
    if checkpoint.canonical_names and family.interleaved_rope:
        mixer = config.layers[0].mixer
        assert isinstance(mixer, AttentionConfig)
        heads = {"q_proj": mixer.spec.num_heads, "k_proj": mixer.spec.num_kv_heads}
        for name, tensor in checkpoint.tensors.items():
            if (part := name.split(".")[-2] if "." in name else "") in heads:
                tensors[name] = unpermute_rows(tensor, heads[part])
    _check_layers(tensors, family, config.num_layers, checkpoint)
    return trailing_modules(tensors, config.num_layers) if family.trailing else tensors


def _check_layers(tensors: Iterable[str], family: Family, num_layers: int, checkpoint: Checkpoint) -> None:
    """Layers beyond the config's can only be MTP modules; they need not be used. Raises ModelError."""
    names = set(tensors)
    held = {int(name.split(".")[1]) for name in names if re.match(r"layers\.\d+\.", name)}
    for layer in sorted(each for each in held if each >= num_layers):
        if not family.trailing or f"layers.{layer}.eh_proj.weight" not in names:
            raise ModelError(
                f"config.json says {num_layers} layers, but {checkpoint.path} holds layer {layer}, counted from 0",
                "correct num_hidden_layers",
            )


def load_model(name: str | None, config: EngineConfig, progress: Progress = no_progress) -> Model:
    """Read a model by path, alias or Hub name, and the head that goes with it; `progress` counts its weights. Raises
    ModelError or UsageError."""
    choose(config)  # before anything is fetched
    alias = hub.resolve_alias(name)
    checkpoint = open_checkpoint(alias.trunk)
    family = find_family(checkpoint)
    sizes = family.parse(checkpoint.config)
    backend = open_backend(config, checkpoint.files)
    tensors = canonical_tensors(checkpoint, family, sizes)
    weights = Weights(tensors, backend, str(alias.trunk), on_take=_counter(tensors, progress))
    decoder = family.build(weights, sizes)
    model = Model(
        name or alias.name, checkpoint, family, sizes, backend, weights, decoder, checkpoint.load_tokenizer(), None
    )
    return replace(model, head=find_head(model, config.head, alias.head(config.drafter)))


def _counter(tensors: Mapping[str, RawTensor], progress: Progress) -> Callable[[RawTensor], None]:
    """Tells how many weights have been taken, in millions."""
    total, done = sum(math.prod(tensor.shape) for tensor in tensors.values()), 0

    def taken(tensor: RawTensor) -> None:
        nonlocal done
        progress(done // 10**6, total // 10**6, "loading, million weights")
        done += math.prod(tensor.shape)

    return taken


def find_head(model: Model, asked: str | None, shipped: Path | None) -> AttachedHead | None:
    """The head asked for, else the native one, else the one shipped with the alias."""
    if asked is not None:
        return attach_head(model, Path(asked))
    native = native_head(model.family, model.weights, model.config)
    if native is not None:
        return AttachedHead(native, NATIVE_HEAD)
    return attach_head(model, shipped) if shipped is not None else None


def attach_head(model: Model, path: Path) -> AttachedHead:
    """Read a head checkpoint, or the head inside another checkpoint, and fit it to the trunk. Raises ModelError saying
    which number differs."""
    if not is_head(path) and path.exists():
        return _head_of_checkpoint(model, path)
    head, tensors, draft_token_ids = read_head(path)
    _check_fit(model, path, head.hidden_size, head.vocab_size)
    weights = Weights(tensors, model.backend, str(path), drafts=True)
    sizes = replace(model.config, mtp_layer=_block(head.block), eps=head.block.eps)
    spec = HeadSpec.of(head)
    if head.kind == "eagle3":
        made = eagle3_head(weights, sizes, spec, head.norm_before_residual, draft_token_ids)
    elif head.kind == "medusa":
        made = MTPHead(spec, medusa_modules(weights, sizes, head.num_modules), head.kind)
    else:
        made = MTPHead(spec, [mtp_module(weights, f"mtp.{i}", sizes) for i in range(head.num_modules)])
    return AttachedHead(made, str(path), draft_token_ids)


def _block(block: BlockConfig) -> LayerConfig:
    mixer = AttentionConfig(
        spec=block.attention,
        rope=block.rope,
        qkv_bias=block.qkv_bias,
        o_bias=block.o_bias,
        qk_norm=block.qk_norm,
        gated=block.gated_attention,
    )
    return LayerConfig(mixer=mixer, mlp=MLPConfig(inner=block.intermediate_size, bias=block.mlp_bias), eps=block.eps)


def _head_of_checkpoint(model: Model, path: Path) -> AttachedHead:
    """The native head of a model in another file: a target and its drafter are often published apart."""
    checkpoint = open_checkpoint(path)
    family = find_family(checkpoint)
    sizes = family.parse(checkpoint.config)
    _check_fit(model, path, sizes.hidden_size, sizes.vocab_size)
    weights = Weights(canonical_tensors(checkpoint, family, sizes), model.backend, str(path), drafts=True)
    found = native_head(family, weights, sizes)
    if found is None:
        raise ModelError(f"{path} is a {checkpoint.config.get('model_type')} model without an MTP head of its own")
    return AttachedHead(found, str(path))


def _check_fit(model: Model, path: Path, hidden_size: int, vocab_size: int) -> None:
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size}
    for name, ours in sizes.items():
        if ours != (theirs := getattr(model.config, name)):
            raise ModelError(
                f"the head {path} does not fit {model.name}: its {name} is {ours}, the model's is {theirs}",
                "use a head trained for this model, or headstart train",
            )


def make_engine(model: Model, config: EngineConfig) -> Engine:
    """Allocate pools for a loaded model and attach the drafter. Raises UsageError for what does not fit."""
    max_length = context_length(model, config)
    drafter_type, method = drafter_of(model, config)
    tap = drafter_type.tap(model.head) if drafter_type else None
    budget = int(model.backend.free_memory() * MEMORY_SHARE)
    states = _states(model, config, budget, drafts=drafter_type is not None)
    num_blocks = config.kv_blocks or _num_blocks(model, config, max_length, budget // 2 if states else budget)
    if num_blocks * config.block_size < max_length:
        raise UsageError(
            f"--kv-blocks {num_blocks} of {config.block_size} tokens hold less than one sequence of {max_length}",
            f"give at least {-(-max_length // config.block_size)} blocks, or lower --max-model-len",
        )
    memory = KVMemory(num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching, states=states)
    num_slots = num_blocks * config.block_size
    runner = Runner(
        model.backend,
        model.decoder,
        num_slots=num_slots,
        hidden_size=tap_width(tap or "post_norm", model.config.hidden_size),
        vocab_size=model.config.vocab_size,
        tap=tap,
        memory=memory,
        keep_probs=config.rule == "rejection",
    )
    drafter: Drafter | None = None
    if drafter_type is not None:
        drafter = drafter_type.attach(
            Target(
                backend=model.backend,
                model=model.decoder,
                config=model.config,
                weights=model.weights,
                memory=memory,
                runner=runner,
                num_slots=num_slots,
                token_budget=config.max_num_batched_tokens,
                ngram=(config.ngram_min, config.ngram_max),
                head=model.head,
            )
        )
        if config.depth != AUTO and config.depth > drafter.max_depth:
            raise UsageError(
                f"--depth is {config.depth}, but drafter {method} goes to {drafter.max_depth} at most",
                f"use --depth {drafter.max_depth} or less",
            )
    model.backend.loaded()
    return Engine(runner, memory, drafter, config, max_length)


def identity(model: Model, config: EngineConfig) -> dict[str, Any]:
    """What the costs of passes and drafts depend on, beside the machine."""
    return {
        "files": hub.stamps(model.checkpoint.files),
        "head": model.head.source if model.head else None,
        "drafter": drafter_of(model, config)[1],
        "backend": [model.backend.name, config.device, config.dtype, config.quantization, config.kv_cache_dtype],
        "threads": config.threads or machine.threads().usable,
        "block_size": config.block_size,
    }


def drafter_of(model: Model, config: EngineConfig) -> tuple[type[Drafter] | None, str]:
    """The drafter class; `auto` takes the head when there is one, with prompt lookup beside it where depths are chosen
    step by step, else prompt lookup alone. Depth 0 needs none."""
    method = config.drafter
    if method == "auto":
        method = "ngram" if model.head is None else "mixed" if config.depth == AUTO else model.head.head.kind
    if method == "none" or config.depth == 0:
        return None, "none"
    found: type[Drafter] = registry.find("drafters", method).DRAFTER
    return found, method


def context_length(model: Model, config: EngineConfig) -> int:
    """The longest prompt plus output. Raises UsageError for more than the model was made for."""
    limit = model.config.max_length
    if config.max_model_len is not None and config.max_model_len > limit:
        raise UsageError(f"--max-model-len is {config.max_model_len}, but the model's context is {limit}")
    return config.max_model_len or limit


def _states(model: Model, config: EngineConfig, budget: int, *, drafts: bool) -> StateMemory | None:
    """Recurrent state for max_num_seqs sequences within a quarter of the budget (bytes), never less than one, and
    snapshots within another; None for a model without any."""
    specs, kept = model.decoder.state_specs, MAX_DEPTH if drafts else 0
    if not specs:
        return None
    running_bytes, snapshot_bytes = (sum(model.backend.state_bytes(spec, rows) for spec in specs) for rows in (kept, 0))
    running = max(1, min(config.max_num_seqs, budget // 4 // running_bytes))
    snapshots = min(MOST_SNAPSHOTS, budget // 4 // snapshot_bytes) if config.enable_prefix_caching else 0
    return StateMemory(running, snapshots, kept, block_size=config.block_size)


def _num_blocks(model: Model, config: EngineConfig, max_length: int, budget: int) -> int:
    """Enough for max_num_seqs full sequences, within the budget (bytes), never less than one sequence."""
    specs = [*model.decoder.kv_specs, *(module.kv_spec for module in (model.head.head.modules if model.head else ()))]
    per_token = sum(model.backend.kv_bytes(spec) for spec in specs if spec) + 4 * model.config.hidden_size
    blocks_per_sequence = -(-max_length // config.block_size)
    affordable = budget // (per_token * config.block_size)
    return max(min(config.max_num_seqs * blocks_per_sequence, affordable), blocks_per_sequence)
