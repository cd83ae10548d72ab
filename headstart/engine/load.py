"""From a model's name to a loaded trunk with its head, and to the backend it runs on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headstart import hub, machine
from headstart.config import EngineConfig
from headstart.core import Progress, no_progress
from headstart.engine.attach import attach_head, find_head
from headstart.errors import CapacityError
from headstart.formats import open_checkpoint
from headstart.formats.base import Checkpoint, in_int4, widened
from headstart.heads.base import Head
from headstart.kernels.backend import TakesTurns, choose, open_backend
from headstart.kernels.ops import Backend
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import Decoder
from headstart.layers.weights import Weights
from headstart.models.base import Family
from headstart.models.tensors import load_decoder
from headstart.text.tokenizer import Tokenizer


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
    head: Head | None


def load_model(
    name: str | None, config: EngineConfig, progress: Progress = no_progress, beside: Backend | None = None
) -> Model:
    """Read a model by path, alias or Hub name, and the head that goes with it; `progress` counts its weights. `beside`:
    the backend of another model that is in use, with which this one shares the threads. Raises ModelError, UsageError
    or CapacityError."""
    choose(config)  # before anything is fetched
    alias = hub.resolve_alias(name)
    checkpoint = open_checkpoint(alias.trunk)
    backend = open_backend(config, checkpoint.files)
    if backend.runs_on == "cpu" and config.quantization is None:
        check_room(checkpoint)
    if isinstance(backend, TakesTurns) and beside is not None:
        backend.take_turns(beside)
    loaded = load_decoder(checkpoint, backend, progress, config.max_model_len)
    model = Model(
        name=name or alias.name,
        checkpoint=checkpoint,
        family=loaded.family,
        config=loaded.config,
        backend=backend,
        weights=loaded.weights,
        decoder=loaded.decoder,
        tokenizer=checkpoint.load_tokenizer(),
        head=None,
    )
    return replace(model, head=find_head(model, config.head, alias.head(config.drafter), config.drafter))


def check_room(checkpoint: Checkpoint) -> None:
    """Raises CapacityError for weights that would be float32, as no kernel takes their type, where this machine can
    never hold them so."""
    types, size = widened(checkpoint.tensors.values())
    memory = machine.memory()
    room = min(memory.total, memory.limit or memory.total)
    if 0 < room < size:
        small = in_int4(size) / 1e9
        raise CapacityError(
            f"{checkpoint.name}: {', '.join(types)} become float32 in memory, {size / 1e9:.1f} GB, and this machine "
            f"has {room / 1e9:.1f}",
            f"--quantization int4 rounds them to {small:.1f} GB; a file in Q3_K_M or IQ4_XS is kept as it is",
        )


def with_head(model: Model, config: EngineConfig) -> Model:
    """The model with the head that the config means now, read anew. Raises ModelError or UsageError."""
    return replace(model, head=find_head(model, config.head, hub.resolve_alias(model.name).head(config.drafter)))


def other_heads(model: Model) -> dict[str, Model]:
    """The model with each shipped head that `--drafter KIND` would take in place of its own, by kind."""
    if model.head is None:
        return {}
    shipped = hub.shipped_heads(model.name).items()
    own = model.head.spec.kind
    return {kind: replace(model, head=attach_head(model, path)) for kind, path in shipped if kind != own}
