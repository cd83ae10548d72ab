"""What a training run goes on from: the head in use, or the run that was interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart import hub
from headstart.engine.attach import NATIVE_HEAD
from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.heads.files import read_head
from headstart.heads.kind import HeadCheckpoint, head_kind
from headstart.kernels.ops import RawTensor
from headstart.layers.mla import MLAConfig
from headstart.layers.moe import MoEConfig
from headstart.train.features import Trunk
from headstart.train.setup import Subject

LM_HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True, eq=False)
class Begun:
    """A head to go on from. `weights`: float32 masters; `own`: what it has in place of the trunk's LM head [V, W] and
    embedding [vocabulary, W], which is not trained; `draft_token_ids` None: the full vocabulary."""

    spec: HeadSpec
    weights: dict[str, Tensor]
    own: Mapping[str, Tensor] = field(default_factory=dict)
    draft_token_ids: NDArray[np.int64] | None = None

    @property
    def keeps_vocabulary(self) -> bool:
        """Do weights belong to its draft tokens?"""
        return LM_HEAD in self.own or "markov.out.weight" in self.weights


def existing_head(subject: Subject, kind: str, path: Path | None) -> Begun:
    """The head at `path`, else the checkpoint's own, else the one of this kind shipped with the model. Raises
    ModelError where there is none, or another kind."""
    native = subject.model.head if path is None else None
    if native is not None and native.source == NATIVE_HEAD:
        if native.spec.kind != kind or native.spec.num_modules != 1:
            raise ModelError(f"the checkpoint's own head is no single {kind} module", "leave out --finetune")
        block = subject.config.head_layer
        if isinstance(block.mlp, MoEConfig) or isinstance(block.mixer, MLAConfig):
            what = "experts" if isinstance(block.mlp, MoEConfig) else "latent attention"
            raise ModelError(f"a head with {what}, like the checkpoint's own, cannot be trained yet")
        names = [name for name in subject.tensors if name.startswith("mtp.0.")]
        return Begun(native.spec, as_masters({name: subject.tensors[name] for name in names}))
    path = path or hub.shipped_heads(subject.model.name).get(kind)
    if path is None:
        raise ModelError(f"the model has no head of kind {kind} to fine-tune", "leave out --finetune, or give --head")
    head = read_head(path)
    if head.spec.kind != kind:
        raise ModelError(f"{path} is a head of kind {head.spec.kind}", f"--kind is {kind}")
    return begun(subject, head)


def begun(subject: Subject, head: HeadCheckpoint) -> Begun:
    """A head that was read. Raises ModelError for one that does not fit the trunk."""
    weights, ids = as_masters(head.tensors), head.draft_token_ids
    own = {name: weights.pop(name) for name in (LM_HEAD, EMBEDDING) if name in weights}
    if LM_HEAD in own and _is_trunks(own[LM_HEAD], subject.trunk, ids):
        del own[LM_HEAD]
    return Begun(head_kind(head.spec.kind).fit(head.spec, subject.config), weights, own, ids)


def _is_trunks(rows: Tensor, trunk: Trunk, ids: NDArray[np.int64] | None) -> bool:
    """A copy of the trunk's rows, as files round it?"""
    whole = trunk.lm_head.cpu()
    theirs = (whole if ids is None else whole[torch.from_numpy(ids)]).to(rows.dtype)
    return theirs.shape == rows.shape and torch.allclose(rows, theirs, rtol=2**-7, atol=0)


def continued_spec(spec: HeadSpec, out: Path) -> HeadSpec:
    """Of the run whose head stands at `out`, where it began as other block drafters than new ones (`spec`) do."""
    if not (spec.block and (out / "config.json").exists()):
        return spec
    begun = read_head(out).spec
    if begun.block is None or begun.tap != spec.tap:
        return spec
    return replace(begun, block=replace(begun.block, block_size=spec.block.block_size))


def as_masters(tensors: Mapping[str, RawTensor]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(tensor.float32().copy()) for name, tensor in tensors.items()}
