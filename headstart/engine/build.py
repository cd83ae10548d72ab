"""Builds an engine from a loaded model: the drafter, the KV cache of all networks, the spill directory."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from headstart import hub, machine, registry
from headstart.cache.blocks import STATE, TRUNK, BlockPart
from headstart.cache.kv_cache import KVCacheManager
from headstart.cache.recurrent import StateCacheManager
from headstart.config import AUTO, MAX_DEPTH, EngineConfig
from headstart.drafters.base import Drafter, DraftVocabulary, TargetModel, TextLookup
from headstart.drafters.ngram import SharedLookup
from headstart.engine.adapters import Adapters
from headstart.engine.draft_engine import DraftEngine
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.engine.runner import Runner
from headstart.engine.vision import VisionEncoder
from headstart.engine.vocabulary import can_sketch, find_sketch, num_exact, reduced_vocabulary
from headstart.errors import ModelError, ParameterError, UsageError
from headstart.files import content_digest, read_text, user_path
from headstart.heads.base import states_of
from headstart.heads.draft_model import DraftModel
from headstart.heads.kind import head_kind
from headstart.layers.decoder import tap_width
from headstart.layers.network import DecoderNetwork, Network, NetworkHandle, stored_width
from headstart.layers.weights import weights_fingerprint
from headstart.version import __version__
from headstart.wording import option

if TYPE_CHECKING:
    from headstart.cache.spill import KVSpill


MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.8}
"""Share of the free memory for the KV cache if --kv-blocks is not given. With recurrent state, the KV cache gets half
of it, sequences' states and snapshots a quarter each. A GPU needs memory for nothing else but activations."""
MAX_SNAPSHOTS = 256  # snapshots of recurrent state in the prefix cache
MAX_CORPUS = 4 * 2**20  # maximum tokens of a lookup corpus, whose index then takes 150 MB of memory
GB = 10**9
DIGESTS = "digests"  # folder of the user cache with digests of files, which take seconds to compute
BLOCK_RECORD = 512  # bytes of bookkeeping per block
PLANNED: WeakKeyDictionary[KVCacheManager, tuple[str, int]] = WeakKeyDictionary()
"""(device, pool bytes) of each live engine. Pools take memory only as they fill, so these bytes are subtracted from the
free memory. The filled part of a pool is thus subtracted twice, which is safe."""
_planning = Lock()


def build_engine(model: Model, config: EngineConfig, max_bytes: int | None = None) -> Engine:
    """Attaches the drafter and allocates pools for a loaded model. max_bytes: limit for the pools, except those of a
    single sequence. Raises UsageError for settings that do not fit."""
    max_length = context_length(model, config)
    drafter_type, method = select_drafter(model, config)
    runner = Runner(model.backend, model.config.vocab_size, keep_probs=config.rule == "rejection")
    vocabulary = reduced_vocabulary(model, config.draft_vocab) if drafter_type else DraftVocabulary()
    corpus = _lookup_corpus(model, config.lookup_corpus) if drafter_type else None
    drafter = drafter_type.attach(_target(model, config, runner, vocabulary, corpus)) if drafter_type else None
    if drafter and config.depth != AUTO and config.depth > drafter.max_depth:
        what = f"is {config.depth}, but drafter {method} goes to {drafter.max_depth} at most"
        raise ParameterError(option("depth"), what, f"use {drafter.max_depth} or less")
    tap = drafter.tap if drafter else None
    trunk = DecoderNetwork(
        model.decoder, tap, tap_width(tap, model.config.hidden_size, model.config.num_streams),
        embedded_width=model.config.hidden_size * len(model.vision.mergers) if model.vision else 0,
    )  # fmt: skip
    runner.vision = VisionEncoder(model.backend, model.vision) if model.vision else None
    networks = [trunk, *(handle.network for handle in runner.networks)]
    processor, vision = model.image_processor, runner.vision
    tower_bytes = vision.max_bytes(processor.max_patches) if vision and processor else 0
    with _planning:
        memory = _allocate_cache(
            model, config, networks, max_length, max_bytes, tower_bytes, drafts=drafter is not None
        )
    num_slots = len(memory.pool.blocks) * config.block_size
    runner.allocate(trunk, memory, num_slots=num_slots)
    model.backend.loaded()
    memory.spill = open_spill(runner, memory, model, config)
    adapters = Adapters(replace(model, head=None), runner)  # without the head, which may be replaced and then freed
    engine = Engine(runner, memory, drafter, adapters, config, max_length)
    engine.drafting.lookup_corpus = corpus
    engine.adapters.add_all(config.adapters)
    if drafter_type and engine.drafting.has_head:
        engine.drafting.num_vocab = num_exact(model, vocabulary)
        if can_sketch(model, config.draft_vocab):
            _use_sketch(engine, model, config, drafter_type)
    return engine


def _use_sketch(engine: Engine, model: Model, config: EngineConfig, drafter_type: type[Drafter]) -> None:
    """Drafts with a sketch of the LM head, if one pays."""
    vocabulary = DraftVocabulary(sketch=find_sketch(engine, model, identity(model, config)))
    if vocabulary.sketch is not None:
        with engine.runner.replacing():
            target = _target(model, config, engine.runner, vocabulary, engine.drafting.lookup_corpus)
            engine.drafting.drafter = drafter_type.attach(target)
        engine.drafting.num_vocab = num_exact(model, vocabulary)


def change_head(engine: Engine, model: Model, config: EngineConfig) -> None:
    """Drafts with the head of `model` from the next step on; its KV is computed from stored trunk states.

    Call between steps only. Raises UsageError or ModelError for a head that needs another engine, and keeps the old
    one.
    """
    drafting, runner = engine.drafting, engine.runner
    drafter_type = select_drafter(model, config)[0]
    if model.head is None or drafter_type is None or not drafting.has_head:
        raise UsageError(
            "no head drafts here", "start with " + option("drafter", "auto") + " and " + option("depth", "auto")
        )
    # a head with its own draft vocabulary (as `adapt` makes them) ignores --draft-vocab N
    has_own = model.head.draft_token_ids is not None
    vocabulary = DraftVocabulary() if has_own else reduced_vocabulary(model, config.draft_vocab)
    with runner.replacing():
        new_drafter = drafter_type.attach(_target(model, config, runner, vocabulary, drafting.lookup_corpus))
        for name in ("method", "tap", "max_depth"):
            if (new_value := getattr(new_drafter, name)) != (current := getattr(drafting.drafter, name)):
                what = f"its {name} is {new_value}, that of the head in use is {current}"
                raise ModelError(what, "start the server again")
    engine.change_drafter(new_drafter)
    if engine.memory.spill:
        engine.memory.spill.change(block_parts(runner, model, config))
    drafting.num_vocab = num_exact(model, vocabulary)


def _target(
    model: Model, config: EngineConfig, runner: Runner, vocabulary: DraftVocabulary, corpus: TextLookup | None
) -> TargetModel:
    return TargetModel(
        backend=model.backend,
        model=model.decoder,
        config=model.config,
        weights=model.weights,
        runner=runner,
        token_budget=config.max_num_batched_tokens,
        ngram=(config.ngram_min, config.ngram_max),
        # under rule rejection the text depends on drafts, so these must not depend on other requests
        shared_lookup=config.shared_lookup and config.rule == "exact",
        lookup_corpus=corpus,
        head=model.head,
        vocabulary=vocabulary,
        draft_texts=_draft_engine(model, config),
    )


def _draft_engine(model: Model, config: EngineConfig) -> DraftEngine | None:
    """The engine of a draft model that has another tokenizer; None without one."""
    if not isinstance(model.head, DraftModel) or model.head.tokenizers is None:
        return None
    whole: Model = model.head.whole
    own = replace(
        config, head=None, drafter=whole.head.spec.kind if whole.head else "none", depth=AUTO, rule="exact",
        max_model_len=None, kv_blocks=None, kv_spill=None, synthetic_acceptance=None, depth_by_batch=None,
        lookup_corpus=None, lora=None,
    )  # fmt: skip
    return DraftEngine(build_engine(whole, own), frozenset(whole.tokenizer.eos_ids))


def _lookup_corpus(model: Model, name: str | None) -> TextLookup | None:
    """Index of the tokens of the text file `name`; None without a name. Raises UsageError if the file cannot be read or
    has more than MAX_CORPUS tokens."""
    if name is None:
        return None
    tokens = model.tokenizer.encode(read_text(name, "give a text file", option("lookup_corpus")))
    if len(tokens) > MAX_CORPUS:
        raise UsageError(
            option("lookup_corpus") + f": {name} has {len(tokens)} tokens", f"use a file of at most {MAX_CORPUS}"
        )
    return SharedLookup.of_corpus(tokens)


def select_drafter(model: Model, config: EngineConfig) -> tuple[type[Drafter] | None, str]:
    """Drafter class and method. `auto`: the head if there is one, with prompt lookup beside it if the depth is `auto`,
    else prompt lookup alone. Depth 0: none."""
    method = config.drafter
    if method == "auto":
        method = "ngram" if model.head is None else "mixed" if config.depth == AUTO else model.head.spec.kind
    if method == "none" or config.depth == 0:
        return None, "none"
    file = _head_drafter(model, method) if method in registry.available("heads") else method
    drafter: type[Drafter] = registry.find("drafters", file).DRAFTER
    return drafter, method


def _head_drafter(model: Model, kind: str) -> str:
    """Drafter file for a kind of head. Raises UsageError if the model has no head of this kind."""
    own_kind = model.head.spec.kind if model.head else None
    if own_kind != kind:
        has = f"its head is of kind {own_kind}" if own_kind else "it has none"
        others = f", or use the drafter {own_kind or 'ngram'}, or " + option("depth", 0)
        hint = "attach one with " + option("head", "DIR") + others
        raise UsageError(f"the model has no {head_kind(kind).title} head ({has})", hint)
    return head_kind(kind).drafter


def context_length(model: Model, config: EngineConfig) -> int:
    """Maximum prompt plus output tokens. Raises UsageError for more than the model's context."""
    limit = model.config.max_length
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ParameterError(option("max_model_len"), f"is {config.max_model_len}, but the model's context is {limit}")
    return config.max_model_len or limit


def _allocate_cache(
    model: Model, config: EngineConfig, networks: list[Network], max_length: int, max_bytes: int | None,
    tower_bytes: int, *, drafts: bool,
) -> KVCacheManager:  # fmt: skip
    """Chooses the number of KV blocks (for all networks and hidden states) and of recurrent-state slots, within a share
    of the memory that is free and planned neither for the vision tower nor by another engine of this process. Raises
    UsageError for --kv-blocks below one sequence or beyond the memory."""
    free = model.backend.free_memory()
    device = model.backend.runs_on
    total = (machine.memory().allowed if device == "cpu" else 0) or free  # bytes, free or not, where that is known
    planned = sum(size for other, size in PLANNED.values() if other == device) + tower_bytes
    budget = int(max(free - planned, 0) * MEMORY_SHARE[device])
    if config.gpu_memory_utilization is not None:
        budget = max(int(total * config.gpu_memory_utilization) - (total - free) - planned, 0)
    budget = budget if max_bytes is None else min(budget, max_bytes)
    states, state_bytes = _state_cache(model, config, budget, drafts=drafts)
    per_token = sum(model.backend.kv_bytes(spec) for network in networks for spec in network.kv_specs)
    per_token += sum(model.backend.hidden_bytes(stored_width(network)) for network in networks)
    block_bytes = max(per_token * config.block_size, 1)  # recurrent layers alone need no blocks
    blocks_per_sequence = -(-max_length // config.block_size)
    affordable = (budget // 2 if states else budget) // block_bytes
    default = max(min(config.max_num_seqs * blocks_per_sequence, affordable), blocks_per_sequence)
    num_blocks = config.kv_blocks or default
    if num_blocks * config.block_size < max_length:
        raise ParameterError(
            option("kv_blocks"),
            f"{num_blocks} of {config.block_size} tokens hold less than one sequence of {max_length}",
            f"give at least {blocks_per_sequence} blocks, or a shorter context",
        )
    wanted = num_blocks * (block_bytes + BLOCK_RECORD)
    if wanted > total and config.kv_blocks:
        raise ParameterError(
            option("kv_blocks"),
            f"{num_blocks} take {wanted / 1e9:.1f} GB, but there are {total / 1e9:.1f} GB",
            f"{max(budget // block_bytes, 1)} blocks take {MEMORY_SHARE[device]:.0%} of what is free: the default",
        )
    memory = KVCacheManager(num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching, states=states)
    PLANNED[memory] = device, num_blocks * block_bytes + state_bytes + tower_bytes
    return memory


def pool_bytes(engine: Engine) -> int:
    """Bytes of the engine's pools when full."""
    return PLANNED[engine.memory][1]


def _state_cache(
    model: Model, config: EngineConfig, budget: int, *, drafts: bool
) -> tuple[StateCacheManager | None, int]:
    """Slots of recurrent state, and the bytes of all slots; (None, 0) for models without recurrent layers. budget:
    bytes. A quarter of it is for the states of up to max_num_seqs sequences (at least one), another quarter for
    snapshots."""
    specs, num_kept = model.decoder.state_specs, MAX_DEPTH if drafts else 0
    if not specs:
        return None, 0
    running_bytes, snapshot_bytes = (
        sum(model.backend.state_bytes(spec, rows) for spec in specs) for rows in (num_kept, 0)
    )
    running_bytes += _head_state_bytes(model)
    num_running = max(1, min(config.max_num_seqs, budget // 4 // running_bytes))
    num_snapshots = min(MAX_SNAPSHOTS, budget // 4 // snapshot_bytes) if config.enable_prefix_caching else 0
    states = StateCacheManager(num_running, num_snapshots, num_kept, block_size=config.block_size)
    return states, num_running * running_bytes + num_snapshots * snapshot_bytes


def _head_state_bytes(model: Model) -> int:
    """Bytes of a sequence's two states of the head (StateCacheManager.plan_head)."""
    modules = model.head.modules if model.head else ()
    return 2 * sum(model.backend.state_bytes(spec) for module in modules for spec in states_of(module))


def identity(model: Model, config: EngineConfig) -> dict[str, Any]:
    """JSON values that the costs of passes and drafts depend on, besides the machine; key of stored calibrations."""
    backend = model.backend
    return {
        "files": hub.file_stamps(model.checkpoint.files),
        "head": model.head.source if model.head else None,
        "drafter": select_drafter(model, config)[1],
        "backend": [backend.name, backend.runs_on, config.dtype, config.rounding, config.kv_cache_dtype],
        "threads": [machine.thread_count(config.threads), config.numa, config.portable_bits],
        "block_size": config.block_size,
    }


def open_spill(runner: Runner, memory: KVCacheManager, model: Model, config: EngineConfig) -> "KVSpill | None":
    """The spill directory (--kv-spill) of an engine; None if not configured. Raises UsageError."""
    if config.kv_spill is None or not config.enable_prefix_caching:
        return None
    from headstart.cache.spill import KVSpill  # imported only when used: saves start-up time
    from headstart.cache.store import BlockStore

    store = BlockStore(user_path(config.kv_spill), int(config.kv_spill_gb * GB))
    parts = block_parts(runner, model, config)
    return KVSpill(store, memory.pool, memory.states, parts, config.block_size)


def block_parts(runner: Runner, model: Model, config: EngineConfig) -> dict[int, BlockPart]:
    """Parts of a block that are stored in files, by part number. A part's name is a digest of version,
    backend, weights, configuration, and for a head its own files."""
    backend, pools = model.backend, runner.stored()
    files = [*model.checkpoint.files, *filter(None, [model.checkpoint.projector])]
    weights = files_digest(files) if files else weights_fingerprint(model.weights.tensors)
    common = [__version__, backend.fingerprint(), weights, repr(model.config), config.block_size]
    tap = repr(getattr(runner.trunk.network, "tap", None))
    names = {TRUNK: [*common, "trunk", tap], STATE: [*common, "state"]}
    for handle in runner.networks:
        names[handle.index] = [*common, "beside", *_head_name(model, handle)]
    return {
        number: BlockPart(_digest(names[number]), backend, each, 1 if number == STATE else config.block_size)
        for number, each in pools.items()
    }


def _head_name(model: Model, handle: NetworkHandle) -> list[object]:
    network, head = handle.network, model.head
    shape = [repr(list(network.kv_specs)), network.first_position, handle.index]
    if head is None:
        return shape
    path = Path(head.source)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return [*shape, repr(head.spec), files_digest(files) if path.exists() else head.source]


def files_digest(files: Iterable[Path]) -> str:
    """`content_digest` of the files, cached until they change."""
    files = list(files)
    record = hub.record_path(DIGESTS, {"files": hub.file_stamps(files)})
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(record.read_bytes())["digest"])
    digest = content_digest(files)
    hub.try_save_record(record, {"digest": digest})
    return digest


def _digest(content: object) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
