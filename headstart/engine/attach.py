"""From a head's name, path or checkpoint to modules on a trunk."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from headstart import hub, registry
from headstart.config import AUTO
from headstart.engine.draft_model import DRAFT_MODEL, load_draft_model
from headstart.errors import ModelError, UsageError
from headstart.formats import open_checkpoint
from headstart.formats.base import Checkpoint
from headstart.heads.base import Head
from headstart.heads.files import is_head, read_head
from headstart.heads.kind import HeadCheckpoint, head_kind
from headstart.heads.near import near
from headstart.kernels.ops import Backend
from headstart.layers.build import DecoderConfig
from headstart.layers.fingerprint import trunk_fingerprint
from headstart.layers.linear import Linear
from headstart.layers.weights import Weights
from headstart.models.base import Family
from headstart.models.tensors import canonical_tensors, check_taken, find_family, read_config
from headstart.text.tokenizer import Tokenizer

log = logging.getLogger("headstart.engine")

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
    @property
    def checkpoint(self) -> Checkpoint: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


def find_head(trunk: Trunk, asked: str | None, shipped: Path | None, drafter: str = AUTO) -> Head | None:
    """The head asked for, else the native one, else the one shipped with the alias. `drafter`: the one asked for."""
    if asked is not None:
        return attach_head(trunk, _located(asked), drafter)
    if drafter == DRAFT_MODEL:
        raise UsageError("drafter draft_model needs a second, smaller model", "name it: --head MODEL")
    native = native_head(trunk.family, trunk.weights, trunk.config)
    return attach_head(trunk, shipped) if native is None and shipped is not None else native


def _located(name: str) -> Path:
    """A path, or what an alias or a repo of the Hub stands for."""
    path = Path(name).expanduser()
    return path if path.exists() or not (hub.is_builtin(name) or hub.is_repo(name)) else hub.resolve_head(name)


def attach_head(trunk: Trunk, path: Path, drafter: str = AUTO) -> Head:
    """Read a head checkpoint, the head inside another checkpoint, or a whole model that drafts, and fit it to the
    trunk. Sizes that fit may be those of a fine-tune, or of a stranger: other weights are a line of the log. Raises
    ModelError saying which number differs."""
    if not is_head(path) and path.exists():
        return _of_checkpoint(trunk, open_checkpoint(path), drafter)
    head = read_head(path)
    if drafter == DRAFT_MODEL:
        what = f"{path} is a head of kind {head.spec.kind}, not a whole model"
        raise ModelError(what, f"use --drafter {head.spec.kind}, or name a smaller model")
    attached = fit_head(trunk, head, path)
    if head.trunk_fingerprint not in ("", trunk_fingerprint(trunk.weights.tensors)):
        told = "the head %s was trained on other weights (%s): drafts may be wrong, texts are not; see headstart bench"
        log.warning(told, path, head.trunk)
    return attached


def fit_head(trunk: Trunk, head: HeadCheckpoint, path: Path) -> Head:
    """A head checkpoint, read from `path`, on the trunk. Raises ModelError saying which number differs."""
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
        near(kind.modules(weights, spec, hidden)),
        str(path),
        head.draft_token_ids,
        lm_head=Linear(weights.get("lm_head.weight", rows, hidden)) if has_one else None,
        embedding=weights.get("embed_tokens.weight", vocab, hidden) if weights.has("embed_tokens.weight") else None,
        lm_heads=lm_heads,
        lm_rows=weights.raw("lm_head.weight", (rows, hidden)) if has_one and rows == vocab else None,
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
    kind = head_kind(spec.kind)
    modules = near(kind.modules(drafting, spec, config.hidden_size))
    lm_heads = kind.lm_heads(drafting, spec, config.vocab_size, config.hidden_size)
    weights.used |= drafting.used
    check_taken(weights, config.num_mtp)
    return Head(spec, modules, source, lm_heads=lm_heads)


def _of_checkpoint(trunk: Trunk, checkpoint: Checkpoint, drafter: str) -> Head:
    """The native head of a model in another file, for a target and its drafter are often published apart; or the whole
    model, where it has none, or is asked for."""
    if drafter == DRAFT_MODEL:
        return load_draft_model(trunk, checkpoint)
    path, family = checkpoint.path, find_family(checkpoint)
    config = read_config(checkpoint, family)
    if not config.num_mtp and drafter not in (set(registry.available("heads")) - {DRAFT_MODEL}):
        _check_smaller(trunk, checkpoint)
        return load_draft_model(trunk, checkpoint)
    _check_fit(trunk, path, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    weights = Weights(canonical_tensors(checkpoint, family, config), trunk.backend, str(path), drafts=True)
    head = native_head(family, weights, config, str(path))
    if head is None:
        what = f"{path} is a {checkpoint.config.get('model_type')} model without an MTP head of its own"
        raise ModelError(what, "for a whole model that drafts: --drafter draft_model")
    return head


def _check_smaller(trunk: Trunk, checkpoint: Checkpoint) -> None:
    """Somebody who names a model as large as the trunk may think that there is a head in it."""
    size, own = (sum(tensor.nbytes for tensor in each.tensors.values()) for each in (checkpoint, trunk.checkpoint))
    if size >= own:
        raise ModelError(
            f"{checkpoint.path} is a model without an MTP head of its own, and not smaller than {trunk.name}: "
            f"{size / 1e9:.3g} GB",
            "name a smaller one, or ask for the drafter draft_model by name to draft with it all the same",
        )


def _check_fit(trunk: Trunk, path: Path, **sizes: int) -> None:
    for name, ours in sizes.items():
        if ours and ours != (theirs := getattr(trunk.config, name)):
            raise ModelError(
                f"the head {path} does not fit {trunk.name}: its {name} is {ours}, the model's is {theirs}",
                "use a head trained for this model; a whole model drafts with --drafter draft_model",
            )
