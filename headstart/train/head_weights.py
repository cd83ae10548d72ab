"""Float32 weights of a head: of a new one, of an existing one to continue from, and written to its directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.engine.load import NATIVE_HEAD, Model
from headstart.formats.quantized.int8 import encode
from headstart.heads.base import HeadSpec
from headstart.heads.files import read_head, write_head
from headstart.heads.kind import HeadCheckpoint, Start, Training, head_kind, is_plain
from headstart.kernels.ops import RawTensor
from headstart.layers.decoder import Decoder
from headstart.train.frozen_model import FrozenModel
from headstart.train.hidden_states import TorchTrunk
from headstart.train.ops import trunk_outputs
from headstart.train.options import check_native_head, saved_head
from headstart.version import __version__

FIRST_LOGITS = 2.0  # standard deviation of the first logits of a head whose block is not like the trunk's
LM_HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
BY_TOKEN = frozenset({LM_HEAD, "markov.out.weight"})  # weights with a row for each draft token


@torch.inference_mode()
def stream_scale(trunk: Decoder, tokens: Tensor) -> float:
    """Median rms of the stream that the last layer reads, over tokens [T]."""
    stream = trunk_outputs(trunk, tokens[None], trunk.embedding.dtype, (len(trunk.layers) - 1,))["tapped"]
    return float(stream.float().square().mean(-1).sqrt().median())


def first_weights(training: Training, spec: HeadSpec, model: Model, scale: float) -> dict[str, Tensor]:
    """Float32 weights of a new head, on the trunk's device. scale: of the stream (`stream_scale`)."""
    trunk, last = model.decoder, f"layers.{model.config.num_layers - 1}."
    layer: dict[str, NDArray[np.float32]] = {}
    if is_plain(model.config.head_layer):
        vectors = {name: each.shape for name, each in model.weights.tensors.items() if len(each.shape) == 1}
        named = {name: shape for name, shape in vectors.items() if name.startswith(last)}
        layer = {
            name.removeprefix(last): _float32_array(model.weights.get(name, *shape)) for name, shape in named.items()
        }
    norm = _float32_array(trunk.norm.weight) * np.float32(trunk.logit_scale)
    if not layer:  # the trunk's norm may be large (Gemma: up to 300), and AdamW moves it slowly
        rows = trunk.lm_head.weight[:: max(1, len(trunk.lm_head.weight) // 4096)].float()
        norm[:] = 2 * FIRST_LOGITS / float(rows.square().mean(0).sum().sqrt())
    first = training.initial(Start(norm, scale if layer else 1.0, layer), spec)
    device = trunk.embedding.device
    return {name: torch.tensor(values, dtype=torch.float32, device=device) for name, values in first.items()}


def _float32_array(tensor: Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return values


@dataclass(frozen=True, eq=False)
class InitialHead:
    """An existing head that training continues from."""

    spec: HeadSpec
    weights: dict[str, Tensor]  # float32, trained
    own: Mapping[str, Tensor] = field(default_factory=dict)  # its own LM head [V, W] and embedding: not trained
    draft_token_ids: NDArray[np.int64] | None = None  # None: the full vocabulary

    @property
    def has_fixed_vocabulary(self) -> bool:
        """True if some weights belong to its draft tokens."""
        return not BY_TOKEN.isdisjoint({*self.own, *self.weights})


def existing_head(frozen_model: FrozenModel, kind: str, path: Path | None) -> InitialHead:
    """The head at `path`; by default the checkpoint's own, or one in this package (`saved_head`)."""
    native = frozen_model.model.head if path is None else None
    if native is not None and native.source == NATIVE_HEAD:
        check_native_head(native.spec, kind)
        tensors = {name: each for name, each in frozen_model.tensors.items() if name.startswith("mtp.0.")}
        return InitialHead(native.spec, _float32_weights(tensors))
    return initial_head(frozen_model, saved_head(frozen_model.model.checkpoint, kind, path))


def initial_head(frozen_model: FrozenModel, head: HeadCheckpoint) -> InitialHead:
    """A head read from a directory. Raises ModelError for one that does not fit the trunk."""
    weights, ids = _float32_weights(head.tensors), head.draft_token_ids
    own = {name: weights.pop(name) for name in (LM_HEAD, EMBEDDING) if name in weights}
    if LM_HEAD in own and _is_trunk_lm_head(own[LM_HEAD], frozen_model.trunk, ids):
        del own[LM_HEAD]
    return InitialHead(head_kind(head.spec.kind).fit(head.spec, frozen_model.config), weights, own, ids)


def _is_trunk_lm_head(rows: Tensor, trunk: TorchTrunk, ids: NDArray[np.int64] | None) -> bool:
    """True if these are the rows of the trunk's LM head, up to the rounding of a file."""
    whole = trunk.lm_head.cpu()
    theirs = (whole if ids is None else whole[torch.from_numpy(ids)]).to(rows.dtype)
    return theirs.shape == rows.shape and torch.allclose(rows, theirs, rtol=2**-7, atol=0)


def resumed_spec(spec: HeadSpec, out: Path) -> HeadSpec:
    """The spec of an interrupted run whose head is at `out`: block drafters keep the form that the run began with,
    which may differ from the form of new ones (`spec`)."""
    if not (spec.block and (out / "config.json").exists()):
        return spec
    saved = read_head(out).spec
    if saved.block is None or saved.tap != spec.tap:
        return spec
    return replace(saved, block=replace(saved.block, block_size=spec.block.block_size))


def _float32_weights(tensors: Mapping[str, RawTensor]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(tensor.float32().copy()) for name, tensor in tensors.items()}


def export_head(
    path: Path, head: HeadCheckpoint, weights: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None
) -> None:
    """Write a head directory, with this version in the provenance. weights: by canonical names; matrices become int8,
    since drafts run in int4, others bfloat16. own: `InitialHead.own`, written in bfloat16."""
    head = replace(head, training={"headstart_version": __version__, **head.training})
    arrays: dict[str, Any] = {name: _bfloat16_bits(tensor) for name, tensor in {**weights, **(own or {})}.items()}
    for name in [name for name, tensor in weights.items() if tensor.ndim == 2 and len(tensor) > 1]:
        arrays |= encode(name, weights[name].detach().float().cpu().numpy())
    write_head(path, head, arrays)


def _bfloat16_bits(tensor: Tensor) -> tuple[NDArray[np.uint16], str]:
    raw: NDArray[np.int16] = tensor.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return raw.view(np.uint16), "BF16"
