"""Medusa (arXiv 2401.10774): one residual layer over the trunk's hidden state for each draft step.

y_k = h_p + silu(W_k h_p + b_k) predicts t_{p+1+k}. The LM head is the trunk's, or one for each k. There is no attention
and no embedding. Canonical tensors: `medusa.{k}.weight`, `medusa.{k}.bias`; more layers are `medusa.{k}.{j}.`;
`lm_heads.{k}.`.

Published directories: FasterDecoding's (`medusa_lm_head.pt`, or safetensors: `{k}.{j}.linear.*` and, last, the LM head
`{k}.{layers}.weight`, under `medusa_head.` or not), vLLM's (`blocks.{k}.layers.{j}.*`, `lm_heads.{k}.weight`,
`token_map`: the target ids of a draft vocabulary).
"""

import math
import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headstart.core import Float32
from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.sizes import Sizes, Unknown
from headstart.heads.base import MAX_LAYERS, MAX_MODULES, HeadSpec
from headstart.heads.kind import HeadCheckpoint, HeadKind, Start, Training, checked_draft_ids
from headstart.heads.published import DeclaredShapes, Document, DrafterFormat, Present
from headstart.kernels.ops import Buffer, Ops, Pool, StepInputs
from headstart.layers.linear import Linear, LMHead
from headstart.layers.weights import Weights


@dataclass(frozen=True)
class MedusaModule:
    """The head of one draft step; `further` layers follow the first."""

    layer: Linear
    further: tuple[Linear, ...] = ()
    kv_specs: tuple[()] = ()

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """See heads.base.Module. The recycled vector is step.hidden itself: all steps read the trunk's state."""
        y = step.hidden
        for layer in (self.layer, *self.further):
            y = ops.add(y, ops.activate(layer(ops, y), "silu"))
        return y, step.hidden


def modules(weights: Weights, spec: HeadSpec, hidden: int) -> Seq[MedusaModule]:
    def layer(name: str) -> Linear:
        return weights.linear(name, hidden, hidden, bias=weights.has(f"{name}.bias", usual=True))

    found = []
    for k in range(spec.num_modules):  # all first matrices, then biases: random weights are drawn in this order
        weights.raw(f"medusa.{k}.weight", (hidden, hidden))
    for k in range(spec.num_modules):
        names = [name for j in range(1, MAX_LAYERS) if weights.has(f"{(name := f'medusa.{k}.{j}')}.weight")]
        found.append(MedusaModule(layer(f"medusa.{k}"), tuple(map(layer, names))))
    return found


def lm_heads(weights: Weights, spec: HeadSpec, hidden: int, rows: int) -> Seq[LMHead]:
    if not weights.has("lm_heads.0.weight"):
        return ()
    return [weights.linear(f"lm_heads.{k}", rows, hidden) for k in range(spec.num_modules)]


def initial(start: Start, spec: HeadSpec) -> dict[str, Float32]:
    """Zeros, as in the paper: each head at first predicts the trunk's next token."""
    return {name: np.zeros(shape, np.float32) for name, shape in HEAD.shapes(spec, len(start.norm)).items()}


# Published directories.


def read(document: Document, tensors: Mapping[str, Tensor], path: Path) -> HeadCheckpoint:
    """DrafterFormat.read. Sizes come from the tensors, because most config.json files lack them."""
    named = {new: tensor for name, tensor in tensors.items() if (new := canonical(name))}
    first, exact = named.get("medusa.0.weight"), named.get("lm_heads.0.weight")
    count = next(k for k in range(MAX_MODULES + 1) if f"medusa.{k}.weight" not in named)
    if first is None or len(first.shape) != 2:
        raise ModelError(f"{path} holds no layers of Medusa heads", "is this a Medusa checkpoint?")
    if strange := sorted(name for name in named if int(name.split(".")[1]) >= count):
        raise ModelError(f"{path} holds {strange[0]}, but no layer of Medusa head {count}", "is the file complete?")
    size = document.get("vocab_size")
    vocab_size = size if type(size) is int and "base_model_name_or_path" not in document else 0
    token_map = tensors.get("token_map")
    ids = None if token_map is None else checked_draft_ids(token_map.numpy(), math.inf, f"{path}: token_map")
    if ids is None and exact is not None:
        vocab_size = exact.shape[0]
    return HeadCheckpoint(
        spec=HeadSpec(kind="medusa", num_modules=count), hidden_size=first.shape[0], vocab_size=vocab_size,
        draft_token_ids=ids, tensors=named, trunk=str(document.get("base_model_name_or_path") or ""),
    )  # fmt: skip


def canonical(name: str) -> str | None:
    """Canonical name of a tensor in a published file; None if no head has it (such as a trunk's in the same file)."""
    for theirs, ours in NAMES.items():
        if match := re.fullmatch(theirs, name):
            head, layer, word = match["k"], match.groupdict().get("j", "0"), match.groupdict().get("word", "weight")
            return ours.format(head) if ours else f"medusa.{head}{'' if layer == '0' else f'.{layer}'}.{word}"
    return None


NAMES = {
    r"(medusa_heads?\.)?(?P<k>\d+)\.(?P<j>\d+)\.linear\.(?P<word>weight|bias)": "",
    r"blocks\.(?P<k>\d+)\.(layers\.)?(?P<j>\d+)\.(linear\.)?(?P<word>weight|bias)": "",
    r"(medusa_heads?\.)?(?P<k>\d+)\.\d+\.weight": "lm_heads.{}.weight",
    r"lm_heads\.(?P<k>\d+)\.weight": "lm_heads.{}.weight",
}
"""Patterns of published names -> canonical LM heads' names; empty: the name of a layer, which `canonical` builds."""


def tensors(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    """DrafterFormat.tensors. Names have one of three spellings."""
    hidden, rows = s["hidden"], s["draft_vocabulary"]
    spellings = (f"{index}.0.linear", f"blocks.{index}.layers.0", f"blocks.{index}.0.linear")
    name = next((each for each in spellings if f"{each}.weight" in present), spellings[0])
    return {
        f"{name}.weight": (hidden, hidden),
        f"?{index}.1.weight": (rows, hidden),
        f"?lm_heads.{index}.weight": (rows, hidden),
        f"?{index}.0.linear.bias": (hidden,),
        f"?blocks.{index}.layers.0.bias": (hidden,),
    }


MEDUSA = DrafterFormat(
    key="medusa",
    title="Medusa",
    method="medusa",
    read=read,
    tensors=tensors,
    model_types=("medusa",),
    architectures=("medusa",),
    keys=("medusa_num_heads",),
    markers=("medusa_heads.0.0.linear.weight", "medusa_head.0.0.linear.weight", "0.0.linear.weight"),
    renamed=(("medusa_heads.", "blocks."), ("medusa_head.", "blocks.")),
    count=("num_heads", "medusa_num_heads"),
)


def _speculator_tensors(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    """DrafterFormat.tensors. With tie_weights all heads share the tensors of head 0."""
    if index and s.config.get("tie_weights"):
        return {}
    inner, vocabulary = Unknown("inner"), s["vocabulary"]
    return {
        f"emb.{index}.weight": (vocabulary, inner),
        f"proj.{index}.weight": (inner, None),
        f"ln.{index}.weight": (inner,),
        f"head.{index}.weight": (vocabulary, inner),
    }


MLP_SPECULATOR = DrafterFormat(  # IBM's variant of Medusa, whose heads also read tokens; identified but not run
    key="mlp_speculator",
    title="MLP speculator",
    method="mlp_speculator",
    tensors=_speculator_tensors,
    model_types=("mlp_speculator",),
    architectures=("mlpspeculator",),
    renamed=(("speculator.", ""),),
    count=("n_predict",),
)
HEAD = HeadKind(
    title="Medusa",
    modules=modules,
    lm_heads=lm_heads,
    block=False,
    formats=(MEDUSA, MLP_SPECULATOR),
    training=Training(spec=lambda layers, depth: HeadSpec(kind="medusa", num_modules=depth), initial=initial),
)
