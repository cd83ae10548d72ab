"""What drafts for a model: of each kind how large it is, how it works, and how often its tokens stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headstart.errors import ModelError, UsageError
from headstart.formats.drafters import DrafterKind
from headstart.formats.json_object import read_packaged
from headstart.formats.mtp_families import symbols
from headstart.formats.rows import in_memory
from headstart.formats.symbols import as_size, lookup, text_config
from headstart.heads.kind import HeadCheckpoint, plain_parts
from headstart.layers.decoder import tapped_layers
from headstart.tools.plan.acceptance import of_length
from headstart.tools.plan.config_layers import KERNELS, Config, parts
from headstart.tools.plan.shape import MLP, Attention, Head, Layers, Shape

HEAD_SIZE, KV_HEADS = 128, 8
EAGLE_INNER, FLASH_INNER = 3.5, 3.0
"""Inner values of a drafter's feed-forward part for each hidden one, as in released drafters."""
EAGLE_TAPS, FLASH_TAPS, FLASH_LAYERS, FLASH_BLOCK = 3, 5, 5, 16
SPARK_BLOCK, MARKOV_RANK = 7, 256
EAGLE_VOCAB = 32_000
MEDUSA_HEADS = 4
FLOAT_BYTES = 2
"""Drafters that are files of their own come in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`make`: one for a model that says nothing of it. `acceptances` by position, the last goes on."""

    title: str
    acceptances: tuple[float, ...]
    source: str
    make: Callable[[Shape], Head] | None = None


def _block(hidden: int, inner: float, inputs: int = 1) -> tuple[Attention, MLP]:
    """A Llama block whose queries, keys and values read `inputs` vectors of the hidden size."""
    heads = max(1, hidden // HEAD_SIZE)
    keys = min(heads, KV_HEADS)
    attention = Attention(
        weights=hidden * HEAD_SIZE * (inputs * (heads + 2 * keys) + heads),
        kernels=KERNELS["full"],
        width=2 * keys * HEAD_SIZE,
        work=2 * heads * HEAD_SIZE,
        splits=keys,
    )
    return attention, MLP(weights=int(3 * hidden * hidden * inner), kernels=KERNELS["dense"])


def _eagle3(shape: Shape) -> Head:
    hidden, vocab = shape.hidden, min(EAGLE_VOCAB, shape.vocab)
    return Head(
        kind="eagle3",
        hidden=hidden,
        vocab=vocab,
        layers=(Layers(1, *_block(hidden, EAGLE_INNER, inputs=2)),),
        projection=EAGLE_TAPS * hidden * hidden,
        own=vocab * hidden,
        assumed=True,
        source=f"one Llama layer, {vocab:,} draft tokens, as released ones have",
    )


def _medusa(shape: Shape) -> Head:
    return Head(
        kind="medusa",
        hidden=shape.hidden,
        vocab=0,
        per_token=shape.hidden * shape.hidden + shape.vocab * shape.hidden,
        once=True,
        most=MEDUSA_HEADS,
        assumed=True,
        source=f"{MEDUSA_HEADS} heads, each with an LM head of its own, as in the paper",
    )


def _dflash(shape: Shape) -> Head:
    hidden = shape.hidden
    return Head(
        kind="dflash",
        hidden=hidden,
        vocab=shape.vocab,
        layers=(Layers(FLASH_LAYERS, *_block(hidden, FLASH_INNER)),),
        projection=FLASH_TAPS * hidden * hidden,
        once=True,
        most=FLASH_BLOCK - 1,
        assumed=True,
        source=f"{FLASH_LAYERS} layers, blocks of {FLASH_BLOCK}, as released ones have",
    )


def _dspark(shape: Shape) -> Head:
    made = replace(_dflash(shape), kind="dspark", most=SPARK_BLOCK)
    return _with_markov(
        replace(
            made, source=f"{FLASH_LAYERS} layers, blocks of {SPARK_BLOCK}, rank {MARKOV_RANK}, as released ones have"
        ),
        MARKOV_RANK,
    )


def _with_markov(head: Head, rank: int) -> Head:
    """A table of all tokens, and a matrix over the draft vocabulary, which each token reads."""
    return replace(head, own=head.own + 2 * head.vocab * rank, again=head.vocab * rank)


def _ngram(shape: Shape) -> Head:
    return Head(kind="ngram", hidden=shape.hidden, vocab=0)


def _none(shape: Shape) -> Head:
    return Head(kind="none", hidden=shape.hidden, vocab=0, most=0)


MAKERS: Mapping[str, Callable[[Shape], Head]] = {
    "eagle3": _eagle3, "medusa": _medusa, "dflash": _dflash, "dspark": _dspark, "ngram": _ngram, "none": _none,
}  # fmt: skip


def _kind(name: str, row: Mapping[str, Any]) -> Kind:
    values = of_length(row["length"], row["depth"]) if "length" in row else tuple(row["acceptances"])
    return Kind(title=row["title"], acceptances=values, source=row["source"], make=MAKERS.get(name))


KINDS: Mapping[str, Kind] = {
    name: _kind(name, row) for name, row in read_packaged("headstart.tools.plan", "drafters.json").items()
}


DESCRIBED = {"eagle": "eagle3", "eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dflash2": "dflash",
             "dspark": "dspark", "medusa": "medusa", "assistant": "assistant"}  # fmt: skip
"""Kinds of files, and what they cost like."""


def parse_drafters(text: str | None) -> tuple[str | None, ...]:
    """Comma-separated kinds; `all`: those that need no file. None: the model's own. Raises UsageError."""
    if text is None:
        return (None,)
    names = [name.strip().lower().replace("-", "_") for name in text.split(",")]
    if names == ["all"]:
        names = [name for name, kind in KINDS.items() if kind.make or name == "mtp"]
    for name in names:
        if name not in KINDS:
            raise UsageError(f"--drafter is {name!r}, which is not known", f"known: {', '.join(KINDS)}, all")
    if "none" in names and len(names) > 1:
        names.remove("none")  # plain decoding is in every table
    return tuple(dict.fromkeys(names))


def with_drafter(shape: Shape, kind: str | None) -> Shape:
    """With a drafter of a kind that its model is known to have, or like released ones. Raises UsageError."""
    if kind is None or kind == shape.head.kind:
        return shape
    if kind in ("draft_model", "assistant"):
        raise UsageError(f"--drafter {kind}: which one?", "give it with --head, a card, a directory or a repo id")
    make = KINDS[kind].make
    if make is None:
        raise UsageError(f"{shape.name} has a head of its own that is {shape.head.kind}, and no MTP head")
    return _replaced(shape, make(shape))


def draft_model(shape: Shape, draft: Shape) -> Shape:
    """With a second, whole model that drafts."""
    head = Head(
        kind="draft_model",
        hidden=draft.hidden,
        vocab=draft.vocab,
        layers=draft.layers,
        own=draft.vocab * draft.hidden * (1 if draft.tied else 2) + draft.looked_up,
        source=draft.name,
    )
    return _replaced(shape, head)


def from_config(shape: Shape, drafter: DrafterKind, name: str, config: Config) -> Shape:
    """With a drafter that is a file of its own, as its config.json describes it. Raises ModelError."""
    kind, config = DESCRIBED.get(drafter.kind), text_config(config)
    hidden = as_size(config.get("hidden_size")) or shape.hidden
    vocab = drafter.draft_vocab_size or as_size(config.get("vocab_size")) or shape.vocab
    if kind is None:
        hint = f"give --drafter, one of {', '.join(KINDS)}: such a one is assumed"
        raise ModelError(f"{name} is a drafter of a kind that plan does not describe: {drafter.title}", hint)
    if kind == "medusa":
        return _replaced(shape, replace(_medusa(shape), most=drafter.num_modules, assumed=False, source=name))
    if kind == "assistant":  # queries over the model's own keys
        config = {**config, "num_kv_shared_layers": config.get("num_hidden_layers")}
    try:
        layers = tuple(Layers(1, *part) for part in parts(config))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, StopIteration) as error:
        raise ModelError(f"{name}: plan needs the sizes that a config.json names: {error}") from error
    if kind in ("dflash", "dspark"):
        made = _block_drafter(shape, drafter, config, layers)
    elif kind == "assistant":
        made = Head(kind=kind, hidden=hidden, vocab=vocab, layers=layers, projection=3 * shape.hidden * hidden)
        made = replace(made, own=vocab * hidden)
    else:
        first = layers[0].attention
        wider = replace(first, weights=2 * first.weights - first.work // 2 * hidden)  # q, k and v read two vectors
        made = replace(_eagle3(shape), layers=(replace(layers[0], attention=wider), *layers[1:]), vocab=vocab)
        made = replace(made, projection=EAGLE_TAPS * shape.hidden * hidden, own=vocab * hidden)
    return _replaced(shape, replace(made, hidden=hidden, assumed=False, source=name))


def _block_drafter(shape: Shape, drafter: DrafterKind, config: Config, layers: tuple[Layers, ...]) -> Head:
    """Of a config.json."""
    sizes = (as_size(lookup(config, key)) for key in symbols()["aux"]["keys"])
    taps = next((size for size in sizes if size), FLASH_TAPS)
    hidden = as_size(config.get("hidden_size")) or shape.hidden
    vocab = drafter.draft_vocab_size or shape.vocab
    made = replace(
        _dflash(shape),
        kind=DESCRIBED[drafter.kind],
        vocab=vocab,
        layers=layers,
        projection=taps * shape.hidden * hidden,
        most=drafter.most_drafts or FLASH_BLOCK - 1,
    )
    ranks = (as_size(lookup(config, key)) for key in (*symbols()["markov"]["keys"], "dflash_config.markov_rank"))
    return _with_markov(made, next((rank for rank in ranks if rank), 0))


def from_checkpoint(shape: Shape, head: HeadCheckpoint, name: str) -> Shape:
    """With a head that is a checkpoint of its own, of the bytes that its tensors have."""
    hidden, spec, ids = shape.hidden, head.spec, head.draft_token_ids
    layers: tuple[Layers, ...] = ()
    if spec.layer is not None:
        attention, mlp = plain_parts(spec.layer)
        heads, keys, size = attention.spec.num_heads, attention.spec.num_kv_heads, attention.spec.head_dim
        mixer = Attention(
            weights=hidden * size * 2 * (heads + keys),
            kernels=KERNELS["full"],
            width=2 * keys * size,
            work=2 * heads * size,
            splits=keys,
        )
        count = spec.block.num_layers if spec.block else 1
        layers = (Layers(count, mixer, MLP(weights=3 * hidden * mlp.inner, kernels=KERNELS["dense"])),)
    made = Head(
        kind=spec.kind,
        hidden=hidden,
        vocab=shape.vocab if ids is None else len(ids),
        layers=layers,
        projection=2 * hidden * hidden if layers else 0,
        modules=spec.num_modules if layers else 1,
        per_token=0 if layers else hidden * hidden,
        once=not layers,
        most=None if layers else spec.num_modules,
        source=name,
    )
    if block := spec.block:
        taps = len(tapped_layers(spec.tap))
        made = replace(made, kind="dspark" if block.anchor_predicts else "dflash", projection=taps * hidden * hidden)
        made = _with_markov(replace(made, once=True, most=block.block_size), block.markov_rank)
    num_bytes = sum(in_memory(tensor).nbytes for tensor in head.tensors.values())
    return _replaced(shape, made, num_bytes / max(made.parameters, 1))


def _replaced(shape: Shape, head: Head, size: float = FLOAT_BYTES) -> Shape:
    """Acceptances that a source names are those of the model's own head."""
    sizes: dict[Any, float] = {**shape.bytes_per_weight, "head": size}
    return replace(shape, head=head, bytes_per_weight=sizes, acceptance=(), acceptance_source="")


def said(head: Head) -> str:
    """One line on what drafts, and what was assumed of it."""
    if not head.drafts:
        return "nothing drafts"
    if head.kind == "mtp" and head.assumed:
        return "drafter: the model has no MTP head: one block like its own last one is assumed"
    name = f"drafter: {KINDS[head.kind].title}" if head.kind in KINDS else f"drafter: {head.kind}"
    told = f", {head.source}" if head.source else ""
    return f"{name}{told}{'; the model comes without one' if head.assumed else ''}"
