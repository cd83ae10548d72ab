"""From a head's name, path or checkpoint to modules on a trunk."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from headstart.errors import ModelError
from headstart.formats import open_checkpoint
from headstart.heads.base import Head
from headstart.heads.files import is_head, read_head
from headstart.heads.kind import HeadCheckpoint, head_kind
from headstart.kernels.ops import Backend
from headstart.layers.build import DecoderConfig
from headstart.layers.linear import Linear
from headstart.layers.weights import Weights
from headstart.models.base import Family
from headstart.models.tensors import canonical_tensors, check_taken, find_family, read_config

NATIVE_HEAD = "the checkpoint"
"""Head.source of a head inside the trunk's own files."""


class Trunk(Protocol):
    """What a head must fit."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> Family: ...
    @property
    def config(self) -> DecoderConfig: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def weights(self) -> Weights: ...


def find_head(trunk: Trunk, asked: str | None, shipped: Path | None) -> Head | None:
    """The head asked for, else the native one, else the one shipped with the alias."""
    if asked is not None:
        return attach_head(trunk, Path(asked))
    native = native_head(trunk.family, trunk.weights, trunk.config)
    return attach_head(trunk, shipped) if native is None and shipped is not None else native


def attach_head(trunk: Trunk, path: Path) -> Head:
    """Read a head checkpoint, or the head inside another checkpoint, and fit it to the trunk. Raises ModelError saying
    which number differs."""
    if not is_head(path) and path.exists():
        return _head_of_checkpoint(trunk, path)
    return fit_head(trunk, read_head(path), path)


def fit_head(trunk: Trunk, head: HeadCheckpoint, path: Path) -> Head:
    """A head checkpoint, read from `path`, on the trunk. Raises ModelError saying which number differs."""
    _check_fit(trunk, path, hidden_size=head.hidden_size, vocab_size=head.vocab_size)
    if head.trunk_layers:
        _check_fit(trunk, path, num_layers=head.trunk_layers)
    kind, weights = head_kind(head.spec.kind), Weights(head.tensors, trunk.backend, str(path), drafts=True)
    spec, hidden, vocab = kind.fit(head.spec, trunk.config), head.hidden_size, head.vocab_size
    rows = vocab if head.draft_token_ids is None else len(head.draft_token_ids)
    return Head(
        spec,
        kind.modules(weights, spec, hidden),
        str(path),
        head.draft_token_ids,
        lm_head=Linear(weights.get("lm_head.weight", rows, hidden)) if weights.has("lm_head.weight") else None,
        embedding=weights.get("embed_tokens.weight", vocab, hidden) if weights.has("embed_tokens.weight") else None,
    )


def native_head(family: Family, weights: Weights, config: DecoderConfig, source: str = NATIVE_HEAD) -> Head | None:
    """The MTP modules inside the checkpoint; None when the config promises none or the file holds none."""
    spec = family.head_of(config)
    if spec is None or not weights.has("mtp.0.projection.weight"):
        return None
    present = sum(weights.has(f"mtp.{i}.projection.weight") for i in range(config.num_mtp))
    if present < config.num_mtp:
        raise ModelError(
            f"config.json promises {config.num_mtp} MTP modules, but {weights.source} holds {present}",
            f"lower the number in config.json to {present}",
        )
    drafting = Weights(weights.tensors, weights.backend, weights.source, drafts=True, on_take=weights.on_take)
    modules = head_kind(spec.kind).modules(drafting, spec, config.hidden_size)
    weights.used |= drafting.used
    check_taken(weights, config.num_mtp)
    return Head(spec, modules, source)


def _head_of_checkpoint(trunk: Trunk, path: Path) -> Head:
    """The native head of a model in another file: a target and its drafter are often published apart."""
    checkpoint = open_checkpoint(path)
    family = find_family(checkpoint)
    config = read_config(checkpoint, family)
    _check_fit(trunk, path, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    weights = Weights(canonical_tensors(checkpoint, family, config), trunk.backend, str(path), drafts=True)
    head = native_head(family, weights, config, str(path))
    if head is None:
        raise ModelError(f"{path} is a {checkpoint.config.get('model_type')} model without an MTP head of its own")
    return head


def _check_fit(trunk: Trunk, path: Path, **sizes: int) -> None:
    for name, ours in sizes.items():
        if ours != (theirs := getattr(trunk.config, name)):
            raise ModelError(
                f"the head {path} does not fit {trunk.name}: its {name} is {ours}, the model's is {theirs}",
                "use a head trained for this model, or headstart train",
            )
