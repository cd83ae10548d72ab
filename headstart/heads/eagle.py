"""EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858).

x = fc [e(t_{p+1}) ; h_p] (+ b), y = Block(x), whose attention reads x without a norm; logits = lm_head(y), with the
trunk's LM head; the next draft step reads y in place of h. SafeAILab/EAGLE, `eagle/model/cnets1.py`; h is the trunk's
state after its final norm. EAGLE-2's trees are chains here. Layers after the first are ordinary blocks.
Canonical tensors: `fuse.weight` [H, 2 H], `fuse.bias` [H], `block.` without an input norm, `layers.{i}.` from 1 on.

Published directories: `fc`, `layers.{i}.*` in safetensors or in `pytorch_model.bin`, and a copy of the trunk's
embedding, which is not read. config.json is that of a Llama model with the head's number of layers.
"""

import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.sizes import Sizes
from headstart.heads.base import HeadSpec
from headstart.heads.kind import HeadCheckpoint, HeadKind, build_further, plain_block
from headstart.heads.published import DeclaredShapes, Document, DrafterFormat, Present, block_shapes
from headstart.kernels.ops import Buffer, KVSpec, Ops, Pool, StepInputs
from headstart.layers.decoder import DecoderLayer
from headstart.layers.linear import Linear
from headstart.layers.parts import split_pools
from headstart.layers.weights import Weights

COPIES = ("embed_tokens.weight", "lm_head.weight")  # copies of the trunk's tensors, which are not read


@dataclass(frozen=True)
class EagleModule:
    fuse: Linear
    layers: Seq[DecoderLayer]

    @property
    def kv_specs(self) -> list[KVSpec]:
        return [spec for layer in self.layers for spec in layer.mixer.kv_specs]

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """See heads.base.Module. The recycled vector equals the input of the LM head."""
        x = self.fuse(ops, ops.concat(embedded, step.hidden))
        delta, residual = None, x
        for layer, own in zip(self.layers, split_pools(pool), strict=True):
            delta, residual = layer(ops, delta, residual, step.positions, own)
        y = residual if delta is None else ops.add(delta, residual)
        return y, y


def modules(weights: Weights, spec: HeadSpec, hidden: int) -> Seq[EagleModule]:
    assert spec.layer is not None
    fuse = weights.linear("fuse", hidden, 2 * hidden, bias=weights.has("fuse.bias"))
    first = spec.layer.build(weights, "block", hidden)
    return [EagleModule(fuse, (first, *build_further(weights, spec, hidden)))]


# Published directories.


def read(document: Document, tensors: Mapping[str, Tensor], path: Path) -> HeadCheckpoint:
    named = {canonical(name): tensor for name, tensor in tensors.items()}
    named = {name: tensor for name, tensor in named.items() if name not in COPIES and not name.endswith("inv_freq")}
    layer, num_layers, hidden, vocab_size = plain_block(document, named, path, "late", "an EAGLE head")
    spec = HeadSpec(kind="eagle", layer=layer, num_layers=num_layers)
    if unknown := sorted(named.keys() - HEAD.shapes(spec, hidden).keys() - {"fuse.bias"}):
        raise ModelError(f"{path}: {unknown[0]} is not known of an EAGLE head", "headstart does not run this variant")
    return HeadCheckpoint(spec=spec, hidden_size=hidden, vocab_size=vocab_size, tensors=named)


def canonical(name: str) -> str:
    """Canonical name of a tensor in a published file."""
    name = re.sub(r"^layers\.0\.", "block.", name.removeprefix("model."))
    return re.sub(r"^fc\.", "fuse.", name)


def tensors(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    """DrafterFormat.tensors. The first layer's input norm is optional."""
    if index:
        return block_shapes(f"layers.{index}.", s, present)
    hidden, vocabulary = s["hidden"], s["vocabulary"]
    return {
        "fc.weight": (hidden, 2 * s["target_hidden"]), "?fc.bias": (hidden,),
        "?embed_tokens.weight": (vocabulary, hidden), "?layers.0.input_layernorm.weight": (hidden,),
        "?norm.weight": (hidden,), "?lm_head.weight": (s["draft_vocabulary"], hidden),
        **block_shapes("layers.0.", s, present, input_norm=False),
    }  # fmt: skip


PUBLISHED = DrafterFormat(
    key="eagle",
    title="EAGLE",
    method="eagle",
    read=read,
    tensors=tensors,
    speculators=("eagle",),
    model_types=("eagle",),
    architectures=("eaglellama", "eaglemistral", "eagleminicpm", "eagleqwen", "eagledeepseek", "causallmeagle"),
    markers=("fc.weight", "model.fc.weight"),
    bare={"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},  # no whole model has one layer
    fallback=True,  # EAGLE-3 and DFlash have such tensors too
    count=("num_hidden_layers",),
)
HEAD = HeadKind(title="EAGLE", modules=modules, formats=(PUBLISHED,))
