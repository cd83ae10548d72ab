"""Other ways to interpret the weights of an MTP head or block drafter, which converters or engines could have meant."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from headstart.config import MAX_DEPTH
from headstart.engine.load import NATIVE_HEAD, Model, fit_head
from headstart.formats.quantization import readable
from headstart.heads.base import Head, HeadSpec, limit_window
from headstart.heads.files import read_head
from headstart.heads.kind import head_kind
from headstart.heads.mtp import MTPModule
from headstart.kernels.streamed import LazyWeight
from headstart.layers.attention import AttentionConfig
from headstart.layers.decoder import Tap, tapped_layers
from headstart.layers.linear import Linear
from headstart.layers.mla import MLAConfig
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Weights
from headstart.models.native_heads import examine
from headstart.tools.inspect.findings import shared_tensors

OTHER_TAP: dict[Tap, Tap] = {"post_norm": "pre_norm", "pre_norm": "post_norm"}


class HeadReading(NamedTuple):
    """Another way to interpret a head's weights."""

    description: str  # such as "the hidden state before the embedding"
    suggestion: str  # the change after which engines read the weights like this
    head: Callable[[], Head]


def mtp_readings(model: Model) -> Iterator[HeadReading]:
    """Yields the other readings of a model's MTP head; none for heads of other kinds."""
    head = model.head
    if head is None or head.spec.kind != "mtp" or not all(isinstance(each, MTPModule) for each in head.modules):
        return
    spec = head.spec
    if spec.tap in OTHER_TAP:
        first = "embedding" if spec.hidden_first else "hidden state"
        fix = "swap the two halves of the columns of the head's projection"
        turned = replace(spec, hidden_first=not spec.hidden_first)
        yield HeadReading(f"the {first} first in the projection", fix, lambda: replace(head, spec=turned))
        where = "before" if spec.tap == "post_norm" else "after"
        fix = f"use an engine that gives the head the hidden state {where} the final norm, or train the head again"
        moved = replace(spec, tap=OTHER_TAP[spec.tap])
        yield HeadReading(f"the hidden state {where} the final norm", fix, lambda: replace(head, spec=moved))
    offset = -1.0 if model.family.norm == "1+w" else 1.0
    verb = "subtract 1 from" if offset < 0 else "add 1 to"
    yield HeadReading(
        f"norms that multiply by {'w' if offset < 0 else '1 + w'}", f"{verb} all norm weights of the head",
        lambda: _with_modules(head, lambda module: _with_norms(module, offset)),
    )  # fmt: skip
    if not spec.joint_norm:  # else their widths differ
        yield HeadReading(
            "the norms of embedding and hidden state exchanged", "exchange the weights of these two norms",
            lambda: _with_modules(
                head, lambda each: replace(each, embedding_norm=each.hidden_norm, hidden_norm=each.embedding_norm)
            ),
        )  # fmt: skip
    yield from _rope(model, head)
    yield from _own(model, head)


def _rope(model: Model, head: Head) -> Iterator[HeadReading]:
    layer = head.spec.layer
    mixer = layer.mixer if layer else None
    if isinstance(mixer, MLAConfig) and mixer.rope and mixer.rotary:
        other: Any = replace(mixer, interleaved=not mixer.interleaved)
        turned = not mixer.interleaved
    elif isinstance(mixer, AttentionConfig) and mixer.rope and not _turned(model, head):
        if mixer.rope.rotary_dim != mixer.spec.head_dim or mixer.rope.trailing:
            return
        other, turned = replace(mixer, rope=replace(mixer.rope, trailing=True)), True
    else:
        return
    assert layer
    spec = replace(head.spec, layer=replace(layer, mixer=other))
    style, now = ("interleaved", "half-split") if turned else ("half-split", "interleaved")
    fix = f"reorder the rotary rows of the head's query and key projections from {style} to {now}"
    yield HeadReading(f"a RoPE that is {style}", fix, lambda: rebuilt(model, head, spec))


def _turned(model: Model, head: Head) -> bool:
    """Whether loading has reordered the head's rotary rows."""
    family, native = model.family, head.source == NATIVE_HEAD
    return native and (family.interleaved_files or (model.checkpoint.canonical_names and family.interleaved_rope))


def _own(model: Model, head: Head) -> Iterator[HeadReading]:
    """Copies of the embedding and the LM head inside the head that differ from the trunk's, which engines use."""
    if head.source != NATIVE_HEAD:
        return
    native = examine(model.checkpoint)
    changed = [what for what, how in shared_tensors(model.checkpoint, native).items() if how == "changed"]
    tensors = readable(model.checkpoint.tensors, model.checkpoint.config) if changed else {}
    for what in changed:
        name = native.copies.get(what, "")
        if name not in tensors or tuple(tensors[name].shape) != (model.config.vocab_size, model.config.hidden_size):
            continue
        weight = model.backend.weight(tensors[name], drafts=True)
        part: dict[str, Any] = {"embedding": weight} if what == "embedding" else {"lm_head": Linear(weight)}
        title = "embedding" if what == "embedding" else "LM head"
        fix = f"use an engine that loads {name}"
        yield HeadReading(f"its own {title}", fix, lambda part=part: replace(head, **part))  # type: ignore[misc]


def block_readings(
    spec: HeadSpec, num_layers: int, read: Callable[[HeadSpec], Head], *, ours: bool = False
) -> Iterator[HeadReading]:
    """Yields other settings of a block drafter on a trunk of `num_layers`; none for other heads. `read` makes a head
    with a spec. `ours`: config.json is in headstart's format, which decides the spelling of suggestions."""
    block, taps = spec.block, tapped_layers(spec.tap)
    if block is None:
        return

    def reading(description: str, suggestion: str, **changes: Any) -> HeadReading:
        return HeadReading(description, suggestion, partial(read, replace(spec, block=replace(block, **changes))))

    style = "half-split" if block.interleaved else "interleaved"
    rope = json.dumps({"interleaved": not block.interleaved} if ours else {"is_neox_style": block.interleaved})[1:-1]
    yield reading(f"a RoPE that is {style}", rope, interleaved=not block.interleaved)
    causal = not block.all_causal
    how = "only earlier rows of their block" if causal else "all rows of their block"
    mask = f'"{"causal" if ours else "is_causal"}": {json.dumps(causal)}'
    yield reading(f"rows that see {how}", mask, causal=causal, causal_windows=causal)
    for step in (1, -1):
        moved = tuple(layer + step for layer in taps)
        if moved[0] >= 0 and moved[-1] < num_layers:
            what = f"layer ids that are one {'higher' if step == 1 else 'lower'}"
            changed = partial(read, replace(spec, tap=moved))
            yield HeadReading(what, f"add {step} to each of its layer ids", changed)
    rows = block.rows_for(block.block_size)
    if drafts := min(rows - block.anchor_predicts, MAX_DEPTH):
        anchor = not block.anchor_predicts
        what = f"a first row that drafts {'too' if anchor else 'nothing'}"
        fix = f'"{"anchor_predicts" if ours else "sample_from_anchor"}": {json.dumps(anchor)}'
        yield reading(what, fix, anchor_predicts=anchor, block_size=drafts)


def rebuilt(model: Model, head: Head, spec: HeadSpec) -> Head:
    """The model's head, read from its tensors again with another spec."""
    if head.source != NATIVE_HEAD:
        path = Path(head.source)
        return fit_head(model, replace(read_head(path), spec=spec), path)
    weights = Weights(model.weights.tensors, model.backend, model.weights.source, drafts=True)
    modules = head_kind(spec.kind).modules(weights, spec, model.config.hidden_size)
    return replace(head, spec=spec, modules=limit_window(modules))


def _with_modules(head: Head, change: Callable[[Any], Any]) -> Head:
    return replace(head, modules=[change(module) for module in head.modules])


def _with_norms(part: Any, offset: float) -> Any:
    """A module, layer or part with `offset` added to the weights of all its norms."""
    if isinstance(part, RMSNorm):
        weight = part.weight
        return replace(part, weight=weight.shifted(offset) if isinstance(weight, LazyWeight) else weight + offset)
    if isinstance(part, tuple):
        parts = tuple(_with_norms(each, offset) for each in part)
        return part if all(new is old for new, old in zip(parts, part, strict=True)) else parts
    if isinstance(part, LazyWeight) or not is_dataclass(part) or isinstance(part, type):
        return part
    pairs = {each.name: getattr(part, each.name) for each in fields(part)}
    changed = {name: new for name, old in pairs.items() if (new := _with_norms(old, offset)) is not old}
    return replace(part, **changed) if changed else part
