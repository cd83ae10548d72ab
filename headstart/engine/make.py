"""From a loaded model to a running engine: the drafter, the memory of all its networks, their pools."""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from headstart import hub, machine, registry
from headstart.cache.memory import KVMemory
from headstart.cache.recurrent import StateMemory
from headstart.config import AUTO, MAX_DEPTH, EngineConfig
from headstart.drafters.base import Drafter, DraftVocabulary, Target
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.engine.runner import Runner
from headstart.engine.spilling import named_parts, open_spill
from headstart.engine.vocabulary import can_sketch, listed, num_exact, sketched
from headstart.errors import ModelError, UsageError
from headstart.heads.kind import head_kind
from headstart.layers.decoder import tap_width
from headstart.layers.network import DecoderNetwork, Network

MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.8}
"""Share of the free memory that the KV cache may take when --kv-blocks is not given; half of it where there is
recurrent state, a quarter of it each for sequences and snapshots. A GPU is there for nothing else but activations."""
MOST_SNAPSHOTS = 256
BLOCK_RECORD = 512
"""Bytes of what is known of a block, beside its content."""
PLANNED: WeakKeyDictionary[KVMemory, tuple[str, int]] = WeakKeyDictionary()
"""Device and bytes of the pools of each engine that lives: a pool takes memory only as it fills, so what is free does
not tell of it. What has been filled counts twice: rather too small a cache than one that is killed."""
_planning = Lock()


def make_engine(model: Model, config: EngineConfig, room: int | None = None) -> Engine:
    """Attach the drafter and allocate pools for a loaded model, of `room` bytes at most where that is for a sequence.
    Raises UsageError for what does not fit."""
    max_length = context_length(model, config)
    drafter_type, method = drafter_of(model, config)
    runner = Runner(model.backend, model.config.vocab_size, keep_probs=config.rule == "rejection")
    vocabulary = listed(model, config.draft_vocab) if drafter_type else DraftVocabulary()
    drafter = drafter_type.attach(_target(model, config, runner, vocabulary)) if drafter_type else None
    if drafter and config.depth != AUTO and config.depth > drafter.max_depth:
        raise UsageError(
            f"--depth is {config.depth}, but drafter {method} goes to {drafter.max_depth} at most",
            f"use --depth {drafter.max_depth} or less",
        )
    trunk = DecoderNetwork(model.decoder, drafter.tap if drafter else None)
    hidden_width = tap_width(trunk.tap, model.config.hidden_size, model.config.num_streams) if trunk.tap else 0
    networks = [trunk, *(opened.network for opened in runner.opened)]
    with _planning:
        memory = _memory(model, config, networks, hidden_width, max_length, room, drafts=drafter is not None)
    num_slots = len(memory.pool.blocks) * config.block_size
    runner.allocate(trunk, memory, num_slots=num_slots, hidden_width=hidden_width)
    model.backend.loaded()
    memory.spill = open_spill(runner, memory, model, config)
    engine = Engine(runner, memory, drafter, config, max_length)
    if drafter_type and engine.drafting.has_head:
        engine.drafting.num_vocab = num_exact(model, vocabulary)
        if can_sketch(model, config.draft_vocab):
            _draft_by_sketch(engine, model, config, drafter_type)
    return engine


def _draft_by_sketch(engine: Engine, model: Model, config: EngineConfig, drafter_type: type[Drafter]) -> None:
    """Where one pays."""
    vocabulary = DraftVocabulary(sketch=sketched(engine, model, identity(model, config)))
    if vocabulary.sketch is not None:
        with engine.runner.replacing():
            engine.drafting.drafter = drafter_type.attach(_target(model, config, engine.runner, vocabulary))
        engine.drafting.num_vocab = num_exact(model, vocabulary)


def change_head(engine: Engine, model: Model, config: EngineConfig) -> None:
    """Draft with the head of `model` from the next step on; what it has not seen is made from the trunk's states.
    Between steps only. Raises UsageError or ModelError for one that needs another engine; the old one then goes on."""
    drafting, runner = engine.drafting, engine.runner
    drafter_type = drafter_of(model, config)[0]
    if model.head is None or drafter_type is None or not drafting.has_head:
        raise UsageError("no head drafts here", "start the server without --no-mtp or another --drafter")
    # a head with tokens of its own, as `adapt` makes them, has no use for --draft-vocab N
    vocabulary = DraftVocabulary() if model.head.draft_token_ids is not None else listed(model, config.draft_vocab)
    with runner.replacing():
        new = drafter_type.attach(_target(model, config, runner, vocabulary))
        for name in ("method", "tap", "max_depth"):
            if (theirs := getattr(new, name)) != (ours := getattr(drafting.drafter, name)):
                raise ModelError(f"its {name} is {theirs}, that of the head in use is {ours}", "start the server again")
    engine.change_drafter(new)
    if engine.memory.spill:
        engine.memory.spill.change(named_parts(runner, model, config))
    drafting.num_vocab = num_exact(model, vocabulary)


def _target(model: Model, config: EngineConfig, runner: Runner, vocabulary: DraftVocabulary) -> Target:
    return Target(
        backend=model.backend,
        model=model.decoder,
        config=model.config,
        weights=model.weights,
        runner=runner,
        token_budget=config.max_num_batched_tokens,
        ngram=(config.ngram_min, config.ngram_max),
        # under rule rejection the text depends on drafts: it must not on other requests
        shared_lookup=config.shared_lookup and config.rule == "exact",
        head=model.head,
        vocabulary=vocabulary,
    )


def drafter_of(model: Model, config: EngineConfig) -> tuple[type[Drafter] | None, str]:
    """The drafter class; `auto` takes the head when there is one, with prompt lookup beside it where depths are chosen
    step by step, else prompt lookup alone. Depth 0 needs none."""
    method = config.drafter
    if method == "auto":
        method = "ngram" if model.head is None else "mixed" if config.depth == AUTO else model.head.spec.kind
    if method == "none" or config.depth == 0:
        return None, "none"
    file = _head_drafter(model, method) if method in registry.available("heads") else method
    drafter: type[Drafter] = registry.find("drafters", file).DRAFTER
    return drafter, method


def _head_drafter(model: Model, kind: str) -> str:
    """The drafter of a kind of head. Raises UsageError where the model has none of that kind."""
    own = model.head.spec.kind if model.head else None
    if own != kind:
        has = f"its head is of kind {own}" if own else "it has none"
        raise UsageError(
            f"the model has no {head_kind(kind).title} head ({has})",
            f"attach one with --head DIR, or use the drafter {own or 'ngram'}, or --no-mtp",
        )
    return head_kind(kind).drafter


def context_length(model: Model, config: EngineConfig) -> int:
    """The longest prompt plus output. Raises UsageError for more than the model was made for."""
    limit = model.config.max_length
    if config.max_model_len is not None and config.max_model_len > limit:
        raise UsageError(f"--max-model-len is {config.max_model_len}, but the model's context is {limit}")
    return config.max_model_len or limit


def _memory(
    model: Model,
    config: EngineConfig,
    networks: list[Network],
    hidden_width: int,
    max_length: int,
    room: int | None,
    *,
    drafts: bool,
) -> KVMemory:
    """Blocks for KV of all networks and hidden states, slots for recurrent state, within a share of the memory that is
    free and that no other engine of this process has planned with. Raises UsageError for fewer blocks than one sequence
    needs, and for more than the memory holds."""
    free = model.backend.free_memory()
    place = model.backend.runs_on
    planned = sum(size for device, size in PLANNED.values() if device == place)
    budget = int(max(free - planned, 0) * MEMORY_SHARE[place])
    budget = budget if room is None else min(budget, room)
    states = _states(model, config, budget, drafts=drafts)
    specs = [spec for network in networks for spec in network.kv_specs]
    backend = model.backend
    per_token = sum(backend.kv_bytes(spec) for spec in specs) + backend.hidden_bytes(hidden_width)
    block_bytes = per_token * config.block_size
    num_blocks = config.kv_blocks or _num_blocks(config, max_length, block_bytes, budget // 2 if states else budget)
    if num_blocks * config.block_size < max_length:
        raise UsageError(
            f"--kv-blocks {num_blocks} of {config.block_size} tokens hold less than one sequence of {max_length}",
            f"give at least {-(-max_length // config.block_size)} blocks, or lower --max-model-len",
        )
    wanted, whole = num_blocks * (block_bytes + BLOCK_RECORD), _whole_memory(place) or free
    if wanted > whole and config.kv_blocks:
        raise UsageError(
            f"--kv-blocks {num_blocks} take {wanted / 1e9:.1f} GB, but there are {whole / 1e9:.1f} GB",
            f"{max(budget // block_bytes, 1)} blocks take {MEMORY_SHARE[place]:.0%} of what is free: the default",
        )
    memory = KVMemory(num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching, states=states)
    PLANNED[memory] = place, num_blocks * block_bytes + _state_bytes(model, states)
    return memory


def pool_bytes(engine: Engine) -> int:
    """What its pools take once they are full."""
    return PLANNED[engine.memory][1]


def _whole_memory(place: str) -> int | None:
    """Bytes, free or not; None where only what is free is known."""
    if place != "cpu":
        return None
    memory = machine.memory()
    return memory.limit or memory.total or None


def _num_blocks(config: EngineConfig, max_length: int, block_bytes: int, budget: int) -> int:
    """Enough for max_num_seqs full sequences, within the budget (bytes), never less than one sequence."""
    blocks_per_sequence = -(-max_length // config.block_size)
    return max(min(config.max_num_seqs * blocks_per_sequence, budget // block_bytes), blocks_per_sequence)


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


def _state_bytes(model: Model, states: StateMemory | None) -> int:
    if states is None:
        return 0
    backend, specs = model.backend, model.decoder.state_specs
    kept = sum(backend.state_bytes(spec, states.num_kept) - backend.state_bytes(spec) for spec in specs)
    return states.num_slots * sum(map(backend.state_bytes, specs)) + states.num_running * kept


def identity(model: Model, config: EngineConfig) -> dict[str, Any]:
    """What the costs of passes and drafts depend on, beside the machine."""
    backend = model.backend
    return {
        "files": hub.stamps(model.checkpoint.files),
        "head": model.head.source if model.head else None,
        "drafter": drafter_of(model, config)[1],
        "backend": [backend.name, backend.runs_on, config.dtype, config.quantization, config.kv_cache_dtype],
        "threads": [config.threads or machine.threads().usable, config.numa],
        "block_size": config.block_size,
    }
