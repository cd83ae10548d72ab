"""Loads a model by name: trunk, backend, and the head or draft model that fits the trunk."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headstart import hub, machine, registry
from headstart.config import AUTO, EngineConfig
from headstart.core import Progress, no_progress
from headstart.engine.matching import Matching, match
from headstart.errors import CapacityError, ModelError, ParameterError, UsageError
from headstart.files import user_path
from headstart.formats import config_alone, open_checkpoint
from headstart.formats.adapter import CONFIG as ADAPTER_CONFIG, beside_model
from headstart.formats.base import Checkpoint, in_int4, widened
from headstart.formats.quantization import declared_name
from headstart.formats.safetensors import CONFIG
from headstart.heads.base import Head, HeadSpec, limit_window
from headstart.heads.draft_model import DraftModel, no_draft_model, parallel_block
from headstart.heads.files import read_head, read_if_head
from headstart.heads.kind import HeadCheckpoint, head_kind
from headstart.kernels.backend import SharesThreads, open_backend, select_backend
from headstart.kernels.ops import Backend
from headstart.kernels.streamed import StreamedBackend
from headstart.layers.build import DecoderConfig, raw_lm_head
from headstart.layers.decoder import Decoder
from headstart.layers.linear import Linear
from headstart.layers.vision import VisionNetwork
from headstart.layers.weights import Weights, trunk_fingerprint
from headstart.models.base import Family
from headstart.models.head_state import usable_heads
from headstart.models.shipped_heads import choose_head, shipped_heads
from headstart.models.slices import sliced
from headstart.models.tensors import (
    LoadedDecoder,
    canonical_tensors,
    find_family,
    load_decoder,
    load_vision,
    read_config,
    unused_tensors,
)
from headstart.text.image_prompt import ImageProcessor
from headstart.text.tokenizer import Tokenizer
from headstart.wording import LEAVE_OUT, option

log = logging.getLogger("headstart.engine")
NATIVE_HEAD = "the checkpoint"  # Head.source of a head inside the trunk's own files
DRAFT_MODEL = "draft_model"
MEMORY_FACTOR, MEMORY_EXTRA = 1.05, 1 << 28  # factor of the bytes of the weights, bytes added: see memory_needed
NEED_HEAD = ("mtp", "block", "mixed")  # values of --drafter that ask for the model's own head


@dataclass(frozen=True)
class Model:
    """A loaded trunk with its head."""

    name: str
    checkpoint: Checkpoint
    family: Family
    config: DecoderConfig
    backend: Backend
    weights: Weights
    decoder: Decoder
    tokenizer: Tokenizer
    head: Head | None
    image_processor: ImageProcessor | None = None  # None: the model reads text only
    vision: VisionNetwork | None = None  # set with `image_processor`
    no_tower: str = ""  # why the vision tower that the config promises is not used, and the remedy
    broken_head: str = ""  # why the MTP head that the config promises is not used, and the remedy


def find_head(trunk: Model, config: EngineConfig) -> Head | None:
    """The head that the config names, else the native one, else the shipped one of the drafter's kind, else the default
    shipped one."""
    if config.head is not None:
        return attach_head(trunk, hub.resolve_head(config.head), config.drafter)
    if config.drafter == DRAFT_MODEL:
        raise no_draft_model()
    if native := native_head(trunk.family, trunk.weights, trunk.config):
        return native
    shipped = choose_head(shipped_heads(trunk.checkpoint), config.drafter)
    return fit_head(trunk, read_head(shipped), shipped) if shipped else None


def attach_head(trunk: Model, path: Path, drafter: str = AUTO) -> Head:
    """Reads a head checkpoint, the head inside another checkpoint, or a draft model, and fits it to the trunk.

    A head trained on other weights of the same sizes is accepted with a warning. Raises ModelError naming the size that
    differs.
    """
    if (head := read_if_head(path)) is None:
        return _head_of_checkpoint(trunk, open_checkpoint(path), drafter)
    if drafter == DRAFT_MODEL:
        message = f"{path} is a head of kind {head.spec.kind}, not a whole model"
        raise ModelError(message, "use " + option("drafter", head.spec.kind) + ", or name a smaller model")
    attached = fit_head(trunk, head, path)
    if head.trunk_fingerprint and head.trunk_fingerprint != trunk_fingerprint(trunk.weights.tensors):
        text = "the head %s was trained on other weights (%s): drafts may be wrong, texts are not; see headstart bench"
        log.warning(text, path, head.trunk)
    return attached


def fit_head(trunk: Model, head: HeadCheckpoint, path: Path) -> Head:
    """Fits a head checkpoint, read from `path`, to the trunk. Raises ModelError naming the size that differs."""
    _check_fit(trunk, path, hidden_size=head.hidden_size, vocab_size=head.vocab_size)
    if head.trunk_layers:
        _check_fit(trunk, path, num_layers=head.trunk_layers)
    kind, weights = head_kind(head.spec.kind), Weights(head.tensors, trunk.backend, str(path), drafts=True)
    spec, hidden = kind.fit(head.spec, trunk.config), head.hidden_size
    vocab = head.vocab_size or trunk.config.vocab_size
    rows = vocab if head.draft_token_ids is None else len(head.draft_token_ids)
    lm_heads = kind.lm_heads(weights, spec, hidden, rows)
    has_one = weights.has("lm_head.weight") and not lm_heads
    return Head(
        spec,
        limit_window(kind.modules(weights, spec, hidden)),
        str(path),
        head.draft_token_ids,
        lm_head=Linear(weights.get("lm_head.weight", rows, hidden)) if has_one else None,
        embedding=weights.get("embed_tokens.weight", vocab, hidden) if weights.has("embed_tokens.weight") else None,
        lm_heads=lm_heads,
        lm_rows=weights.raw("lm_head.weight", (rows, hidden)) if has_one and rows == vocab else None,
    )


def native_head(family: Family, weights: Weights, config: DecoderConfig, source: str = NATIVE_HEAD) -> Head | None:
    """The MTP modules inside the checkpoint, or the drafter in their place; None if the config declares none or the
    file holds none."""
    spec = family.head_of(config)
    if spec is None:
        return None
    kind = head_kind(spec.kind)
    if not weights.has(next(iter(kind.shapes(spec, config.hidden_size)))):
        return None
    drafting = Weights(weights.tensors, weights.backend, weights.source, drafts=True, on_take=weights.on_take)
    modules = limit_window(kind.modules(drafting, spec, config.hidden_size))
    lm_heads = kind.lm_heads(drafting, spec, config.hidden_size, config.vocab_size)
    weights.used |= drafting.used
    if extra := unused_tensors(weights, config.num_mtp):
        log.warning("%s: tensors that this family's head does not have: %s", weights.source, ", ".join(extra))
    return Head(spec, modules, source, lm_heads=lm_heads)


def _head_of_checkpoint(trunk: Model, checkpoint: Checkpoint, drafter: str) -> Head:
    """The native head of another model's file (a target and its drafter are often published separately); the whole
    model as drafter if it has no head or --drafter asks for it."""
    if drafter == DRAFT_MODEL:
        return load_draft_model(trunk, checkpoint)
    path, family = checkpoint.path, find_family(checkpoint)
    config = read_config(checkpoint, family)
    if not config.num_mtp and drafter not in (set(registry.available("heads")) - {DRAFT_MODEL}):
        _check_smaller(trunk, checkpoint)
        return load_draft_model(trunk, checkpoint)
    _check_fit(trunk, path, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    heads = usable_heads(checkpoint)
    if heads.broken is not None:
        raise heads.broken.as_error(checkpoint.name)
    config = _with_modules(config, heads.num_modules)
    weights = Weights(canonical_tensors(checkpoint, family, config), trunk.backend, str(path), drafts=True)
    head = native_head(family, weights, config, str(path))
    if head is None:
        message = f"{path} is a {checkpoint.config.get('model_type')} model without an MTP head of its own"
        raise ModelError(message, "for a whole model that drafts: " + option("drafter", "draft_model"))
    return head


def _with_modules(config: DecoderConfig, num_modules: int | None) -> DecoderConfig:
    """The config with this number of MTP modules; None: as many as it declares."""
    return config if num_modules is None else replace(config, num_mtp=num_modules)


def _check_smaller(trunk: Model, checkpoint: Checkpoint) -> None:
    """Raises ModelError for a draft model as large as the trunk: probably the user expects a head inside it."""
    size, trunk_size = checkpoint.loaded_bytes, trunk.checkpoint.loaded_bytes
    if size >= trunk_size:
        raise ModelError(
            f"{checkpoint.path} is a model without an MTP head of its own, and not smaller than {trunk.name}: "
            f"{size / 1e9:.3g} GB",
            "name a smaller one, or ask for the drafter draft_model by name to draft with it all the same",
        )


def _check_fit(trunk: Model, path: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        if size and size != (expected := getattr(trunk.config, name)):
            raise ModelError(
                f"the head {path} does not fit {trunk.name}: its {name} is {size}, the model's is {expected}",
                "use a head trained for this model; a whole model drafts with " + option("drafter", "draft_model"),
            )


def load_draft_model(trunk: Model, checkpoint: Checkpoint) -> DraftModel:
    """Loads a second model as drafter. Raises ModelError for a vocabulary that has little in common, and for recurrent
    layers."""
    path = checkpoint.path
    with trunk.backend.reading(checkpoint.files):
        loaded = load_decoder(checkpoint, trunk.backend)
        if loaded.decoder.state_specs:
            hint = "use a draft model that has only attention layers"
            raise ModelError(f"{path} has recurrent layers, which cannot draft yet", hint)
        trunk_size, draft_size = trunk.config.vocab_size, loaded.config.vocab_size
        tokenizer = _tokenizer(checkpoint, same_size=trunk_size == draft_size)
        block = parallel_block(checkpoint.config, loaded.config)
        matching: Matching | None = Matching(range(min(trunk_size, draft_size)), None)
        if tokenizer is not None:
            names, sizes = (trunk.name, str(path)), (trunk_size, draft_size)
            matching = match(trunk.tokenizer, tokenizer, sizes, names, by_token=block is not None)
        rows = matching.rows if matching else None
        decoder = loaded.decoder if rows is None else _with_lm_head_rows(loaded, rows)
    heads = usable_heads(checkpoint)
    whole = replace(
        trunk, name=str(path), checkpoint=checkpoint, family=loaded.family, weights=loaded.weights,
        config=_with_modules(loaded.config, heads.num_modules),
        decoder=decoder, tokenizer=tokenizer or trunk.tokenizer, head=None, image_processor=None, broken_head="",
    )  # fmt: skip
    draft_model = DraftModel(spec=HeadSpec(kind=DRAFT_MODEL, block=block), modules=(), source=str(path), whole=whole)
    if matching is None:
        assert tokenizer
        own = replace(whole, head=_step_head(whole))
        return replace(draft_model, tokenizers=(trunk.tokenizer, tokenizer), whole=own)
    ids = None if len(matching.ids) == trunk_size else np.array(matching.ids, np.int64)
    own_ids = matching.own_ids(trunk_size)
    if block is None and ids is None and own_ids is None:  # a head drafts the ids of its model
        whole = replace(whole, head=_step_head(whole))
    return replace(draft_model, draft_token_ids=ids, own_ids=own_ids, whole=whole)


def _step_head(whole: Model) -> Head | None:
    """The draft model's own head, if it drafts step by step from the model's hidden states."""
    head = find_head(whole, EngineConfig())
    return head if head and head_kind(head.spec.kind).drafter == "head" and not head.spec.reader else None


def _tokenizer(checkpoint: Checkpoint, *, same_size: bool) -> Tokenizer | None:
    """The draft model's tokenizer; None if it has none, but as many tokens as the trunk."""
    try:
        return checkpoint.load_tokenizer()
    except ModelError:
        if same_size:
            return None
        raise


def _with_lm_head_rows(loaded: LoadedDecoder, rows: list[int]) -> Decoder:
    """The decoder with only these rows in its LM head."""
    chosen = raw_lm_head(loaded.weights, loaded.config).take_rows(np.array(rows))
    return replace(loaded.decoder, lm_head=Linear(loaded.weights.take(lambda: chosen)))


def load_model(
    name: str | None, config: EngineConfig, progress: Progress = no_progress, neighbour: Backend | None = None, *,
    streamed: bool = False,
) -> Model:  # fmt: skip
    """Loads a model by path, alias or Hub name, with its head; `progress` counts weights.

    neighbour: backend of another loaded model, whose threads this one shares. streamed: read no weights; the model's
    backend is a StreamedBackend, and its parts can be run layer by layer only. Raises ModelError, UsageError or
    CapacityError.
    """
    select_backend(config)  # fails before anything is downloaded
    checkpoint, backend = _open(name, config, streamed=streamed)
    if isinstance(backend, SharesThreads) and neighbour is not None:
        backend.share_threads(neighbour)
    heads = usable_heads(checkpoint)
    broken = str(heads.broken or "")
    if heads.broken and config.head is None and config.drafter in NEED_HEAD and config.depth != 0:
        raise heads.broken.as_error(checkpoint.name)
    with ThreadPoolExecutor(1, "tokenizer") as pool:  # in parallel with the packing of weights, which is C++
        tokenizer = pool.submit(checkpoint.load_tokenizer)
        loaded = load_decoder(checkpoint, backend, progress, config.max_model_len)
        if not tokenizer.done():  # large vocabularies take seconds at their first start
            backend.loaded(partly=True)
    found, network, no_tower = load_vision(checkpoint, loaded.family, loaded.config, backend)
    if config.mmproj is not None and no_tower:
        raise UsageError(option("mmproj") + ": " + no_tower)
    model = Model(
        name=name or hub.DEFAULT_MODEL, checkpoint=checkpoint, family=loaded.family,
        config=_with_modules(loaded.config, heads.num_modules),
        backend=backend, weights=loaded.weights, decoder=loaded.decoder, tokenizer=tokenizer.result(), head=None,
        broken_head=broken, vision=network, no_tower=no_tower,
        image_processor=ImageProcessor(found.format, tokenizer.result()) if found else None,
    )  # fmt: skip
    model = with_head(model, config)
    if (checkpoint.path / ADAPTER_CONFIG).exists() and not config.lora:
        log.warning("%s", beside_model(checkpoint.path))
    if broken and model.head is None and config.drafter == AUTO and config.depth != 0:
        log.warning("%s is served without its MTP head: %s", checkpoint.name, broken)
    return model


def _open(name: str | None, config: EngineConfig, *, streamed: bool) -> tuple[Checkpoint, Backend]:
    """The checkpoint, with its headers read, and the backend of `load_model`. The family is checked before weights are
    downloaded, and before missing weights are reported."""
    repo = hub.repo_of(name) if name is not None else None
    if name is not None and repo and not repo.file:
        with suppress(UsageError):  # a repo of GGUF files, or an error that `resolve` reports, too
            find_family(config_alone(hub.config_file(name), name))
    path = hub.resolve(name)
    try:
        checkpoint = open_checkpoint(path)
    except ModelError:
        if (path / CONFIG).exists():
            find_family(config_alone(path / CONFIG, str(path)))
        raise
    checkpoint = sliced(checkpoint, config.slice)
    if config.mmproj is not None:
        checkpoint = replace(checkpoint, projector=user_path(config.mmproj))
    check_format(checkpoint, config)
    if streamed:
        unmapped = {name: tensor.unmapped() for name, tensor in checkpoint.tensors.items()}
        return replace(checkpoint, tensors=unmapped), StreamedBackend(open_backend(config))
    backend = open_backend(config, checkpoint.files)
    if backend.runs_on == "cpu" and config.rounding is None:
        check_memory(checkpoint)
    return checkpoint, backend


def check_format(checkpoint: Checkpoint, config: EngineConfig) -> None:
    """Raises UsageError if --quantization names another format than the checkpoint's."""
    if config.quantization in (None, config.rounding):
        return
    name = "gguf" if checkpoint.format == "gguf" else declared_name(checkpoint.config).replace("_", "-")
    if name != config.quantization:
        raise ParameterError(
            option("quantization"),
            f"{config.quantization}, but {checkpoint.name} is {name or 'not quantized'}",
            LEAVE_OUT + ("" if name else "; int8 and int4 round the weights at load"),
        )


def memory_needed(checkpoint: Checkpoint) -> int:
    """Bytes of memory in which the whole model runs: its weights, with room for caches and activations."""
    return int(MEMORY_FACTOR * checkpoint.loaded_bytes) + MEMORY_EXTRA


def check_memory(checkpoint: Checkpoint) -> None:
    """Raises CapacityError if the weights exceed this machine's memory after those without a kernel for their type are
    converted to float32."""
    (types, size), max_bytes = widened(checkpoint.tensors.values()), machine.memory().allowed
    if 0 < max_bytes < size:
        small = in_int4(size) / 1e9
        raise CapacityError(
            f"{checkpoint.name}: {', '.join(types)} become float32 in memory, {size / 1e9:.1f} GB, and this machine "
            f"has {max_bytes / 1e9:.1f}",
            option("quantization", "int4")
            + f" rounds them to {small:.1f} GB; a file in Q3_K_M or IQ4_XS is kept as it is",
        )


def with_head(model: Model, config: EngineConfig) -> Model:
    """The model with the config's head, which is read again. Raises ModelError or UsageError."""
    return replace(model, head=find_head(model, config))


def other_heads(model: Model) -> dict[str, Model]:
    """Kind -> the model with the shipped head of this kind (`--drafter KIND`), for all kinds but the model's own."""
    if model.head is None:
        return {}
    others = {kind: path for kind, path in shipped_heads(model.checkpoint).items() if kind != model.head.spec.kind}
    return {kind: replace(model, head=fit_head(model, read_head(path), path)) for kind, path in others.items()}
