"""From a model's name to a loaded trunk with its head, and to the backend it runs on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headstart import hub
from headstart.config import EngineConfig
from headstart.core import Progress, no_progress
from headstart.engine.attach import attach_head, find_head
from headstart.formats import open_checkpoint
from headstart.formats.base import Checkpoint
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
    the backend of another model that is in use, with which this one shares the threads. Raises ModelError or
    UsageError."""
    choose(config)  # before anything is fetched
    alias = hub.resolve_alias(name)
    checkpoint = open_checkpoint(alias.trunk)
    backend = open_backend(config, checkpoint.files)
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
