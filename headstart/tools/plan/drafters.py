"""Drafters for `plan`: sizes, cost of a draft and acceptance rates of each kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart.config import MAX_DEPTH
from headstart.errors import ModelError, UsageError
from headstart.formats.json_object import read_packaged
from headstart.formats.rows import in_memory
from headstart.formats.sizes import Sizes
from headstart.heads import assistant
from headstart.heads.base import HeadSpec
from headstart.heads.kind import HeadCheckpoint, head_kind
from headstart.kernels.ops import AttentionSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.costs import FeedForwardCost, LayerCost, num_elements
from headstart.layers.mlp import MLPConfig
from headstart.models.classify import DrafterKind
from headstart.models.described import read_common
from headstart.stats import equal_acceptance
from headstart.tools.plan.shape import DrafterShape, LayerGroup, ModelShape

Config = Mapping[str, Any]
HEAD_SIZE, KV_HEADS = 128, 8
FLOAT_BYTES = 2  # bytes per weight of drafters with files of their own (bfloat16)
LENGTH_DEPTH = 3  # depth that --acceptance LENGTH refers to if --depth is not given


def expected_tokens(acceptances: Sequence[float], depth: int) -> float:
    """Returns the expected tokens of a step: 1 + sum over i <= depth of the product of the first i conditional
    acceptances. The last acceptance holds for all later positions."""
    total, product = 1.0, 1.0
    for position in range(depth):
        product *= acceptances[min(position, len(acceptances) - 1)]
        total += product
    return total


def acceptances_of_lengths(lengths: Sequence[float]) -> tuple[float, ...]:
    """Returns conditional acceptances from the acceptance lengths at depth 1, 2, ...: the gain of position i divided by
    the gain of the position before. They are cut to at most 1, since the lengths are separate measurements."""
    cumulative = [length - before for length, before in zip(lengths, (1.0, *lengths), strict=False)]
    shares = zip(cumulative, (1.0, *cumulative), strict=False)
    return tuple(min(1.0, max(0.0, share / before)) if before > 0 else 0.0 for share, before in shares)


def acceptances_of_length(length: float, depth: int) -> tuple[float]:
    """Returns the acceptance, equal at all positions, that gives the acceptance length `length` at `depth`. Raises
    UsageError unless 1 <= length <= depth + 1."""
    if not 1 <= length <= depth + 1:
        what = f"--acceptance {length:g} is an acceptance length, but depth {depth} gives 1 to {depth + 1}"
        raise UsageError(what, "give --depth as well, or acceptances by position such as 0.85,0.7,0.6")
    return (equal_acceptance(length, depth),)


def parse_acceptances(text: str, depths: Sequence[int]) -> tuple[tuple[float, ...], str]:
    """Parses '0.85,0.7,0.6' (conditional, by position) or '2.5' (an acceptance length at the only entry of `depths`,
    else at LENGTH_DEPTH). Returns (acceptances, description). Raises UsageError for anything else."""
    try:
        values = tuple(float(each) for each in text.split(","))
    except ValueError:
        raise UsageError(f"--acceptance is {text!r}, which is not numbers", "for example 0.85,0.7,0.6 or 2.5") from None
    if len(values) == 1 and values[0] > 1:
        depth = depths[0] if len(depths) == 1 and depths[0] else LENGTH_DEPTH
        acceptances = acceptances_of_length(values[0], depth)
        return acceptances, f"acceptance length {values[0]:g} at depth {depth}: {acceptances[0]:.3f} at every position"
    if not all(0 <= value <= 1 for value in values):
        raise UsageError(f"--acceptance is {text!r}, but shares lie between 0 and 1", "for example 0.85,0.7,0.6")
    if len(values) > MAX_DEPTH:
        raise UsageError(f"--acceptance has {len(values)} positions, but depths go to {MAX_DEPTH}")
    shown = ", ".join(f"{value:g}" for value in values)
    return values, f"acceptances {shown} by position, as given; the last holds for later positions"


@dataclass(frozen=True, kw_only=True)
class DrafterType:
    title: str
    acceptances: tuple[float, ...]  # conditional, by position; the last holds for all later positions
    source: str  # of the acceptances
    typical: Mapping[str, Any] | None = None  # sizes of released drafters; None: a checkpoint is needed

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "DrafterType":
        """Reads a row of drafters.json, which has acceptances or a measured acceptance length."""
        measured = "length" in row
        shares = acceptances_of_length(row["length"], row["depth"]) if measured else tuple(row["acceptances"])
        return cls(title=row["title"], acceptances=shares, source=row["source"], typical=row.get("typical"))


def _plain_block(hidden: int, inner: float, inputs: int) -> LayerCost:
    """Returns the cost of a decoder layer with attention and a gated MLP of `inner` times the hidden size. Queries,
    keys and values read `inputs` vectors of the hidden size."""
    heads = max(1, hidden // HEAD_SIZE)
    keys = min(heads, KV_HEADS)
    attention = AttentionConfig(spec=AttentionSpec(heads, keys, HEAD_SIZE, 1.0), rope=None)
    weights = hidden * HEAD_SIZE * (inputs * (heads + 2 * keys) + heads)
    feed_forward = FeedForwardCost(weights=int(3 * hidden * hidden * inner), num_kernels=MLPConfig.num_kernels)
    return LayerCost(attention.cost(weights), feed_forward)


def _with_markov(drafter: DrafterShape, rank: int) -> DrafterShape:
    """Adds a Markov table: two matrices [vocabulary, rank], one of which is read for each drafted token."""
    size = drafter.vocab_size * rank
    return replace(drafter, own_vocab=drafter.own_vocab + 2 * size, shared_per_token=size)


def typical_drafter(shape: ModelShape, kind: str) -> DrafterShape:
    """Returns a drafter for this model with the sizes of released drafters of its kind."""
    row, hidden = DRAFTER_TYPES[kind].typical or {}, shape.hidden_size
    num_layers = row.get("layers", 0)
    vocab = min(row.get("draft_vocab", shape.vocab_size), shape.vocab_size) if num_layers else 0
    drafter = DrafterShape(
        kind=kind, hidden_size=hidden, vocab_size=vocab,
        layers=(LayerGroup(num_layers, _plain_block(hidden, row["inner"], row["inputs"])),) if num_layers else (),
        projection=row.get("taps", 0) * hidden * hidden,
        per_token=hidden * (hidden + shape.vocab_size) if "own_lm_heads" in row else 0,
        own_vocab=vocab * hidden if "draft_vocab" in row else 0, single_pass=row.get("single_pass", False),
        max_depth=row.get("max_depth"), assumed="source" in row, source=row.get("source", "").format(vocab=vocab),
    )  # fmt: skip
    return _with_markov(drafter, row["markov_rank"]) if "markov_rank" in row else drafter


ROWS = read_packaged("headstart.tools.plan", "drafters.json")
DRAFTER_TYPES = {name: DrafterType.of(row) for name, row in ROWS.items()}
TYPE_OF_FILES = {
    "eagle": "eagle3", "eagle3": "eagle3", "peagle": "eagle3", "dflash": "dflash", "dflash2": "dflash",
    "dspark": "dspark", "medusa": "medusa", "assistant": "assistant",
}  # fmt: skip
"""Kind of a drafter checkpoint (models/classify.py) -> key of DRAFTER_TYPES with the same costs."""


def parse_drafters(text: str | None) -> tuple[str | None, ...]:
    """Parses comma-separated kinds; `all` means the kinds that need no checkpoint. None stands for the model's own
    drafter. Raises UsageError for an unknown kind."""
    if text is None:
        return (None,)
    names = [name.strip().lower().replace("-", "_") for name in text.split(",")]
    if names == ["all"]:
        names = [name for name, kind in DRAFTER_TYPES.items() if kind.typical is not None or name == "mtp"]
    for name in names:
        if name not in DRAFTER_TYPES:
            raise UsageError(f"--drafter is {name!r}, which is not known", f"known: {', '.join(DRAFTER_TYPES)}, all")
    if "none" in names and len(names) > 1:
        names.remove("none")  # every table contains plain decoding
    return tuple(dict.fromkeys(names))


def with_drafter(shape: ModelShape, kind: str | None) -> ModelShape:
    """Returns the shape with its own or a typical drafter. Raises UsageError for a kind that needs a checkpoint."""
    if kind is None or kind == shape.drafter.kind:
        return shape
    if kind in ("draft_model", "assistant"):
        raise UsageError(f"--drafter {kind} needs a checkpoint", "name a card, a directory or a repo id with --head")
    if DRAFTER_TYPES[kind].typical is None:
        raise UsageError(f"{shape.name} has a head of kind {shape.drafter.kind}, and no MTP head")
    return _replace_drafter(shape, typical_drafter(shape, kind))


def draft_model(shape: ModelShape, draft: ModelShape) -> ModelShape:
    sizes = draft.parameters()
    drafter = DrafterShape(
        kind="draft_model", hidden_size=draft.hidden_size, vocab_size=draft.vocab_size, layers=draft.layers,
        projection=draft.outer, own_vocab=sizes["lm_head"] + draft.embedding, source=draft.name,
    )  # fmt: skip
    return _replace_drafter(shape, drafter)


def from_config(shape: ModelShape, drafter: DrafterKind, name: str, config: Config) -> ModelShape:
    """Returns the shape with the drafter of a config.json. Raises ModelError for a kind that plan cannot describe."""
    kind, sizes = TYPE_OF_FILES.get(drafter.kind), Sizes(config)
    hidden, vocab = sizes.get("hidden") or shape.hidden_size, drafter.draft_vocab_size or shape.vocab_size
    if kind is None:
        hint = f"give --drafter instead, one of {', '.join(DRAFTER_TYPES)}, for a typical drafter"
        raise ModelError(f"{name} is a drafter of a kind that plan does not describe: {drafter.title}", hint)
    if kind == "medusa":
        medusa = replace(typical_drafter(shape, "medusa"), max_depth=drafter.num_modules, assumed=False, source=name)
        return _replace_drafter(shape, medusa)
    if kind == "assistant":  # reads the model's keys
        reader = assistant.read({"text_config": sizes.config, **config}, {}, Path(name)).spec.reader
        costs = [layer.cost(hidden) for layer in reader.layers] if reader else []
    else:
        common = read_common({"vocab_size": vocab, **sizes.config})
        costs = [layer.cost(common.hidden_size) for layer in common.layers]
    layers = [LayerGroup(1, cost) for cost in costs]
    if kind in ("dflash", "dspark"):
        typical, projection = typical_drafter(shape, "dflash"), sizes["taps"] * shape.hidden_size * hidden
        depth = drafter.max_drafts or typical.max_depth
        built = replace(typical, kind=kind, vocab_size=vocab, projection=projection, max_depth=depth)
        built = _with_markov(built, sizes.get("markov_rank") or 0)
    elif kind == "assistant":
        built = DrafterShape(
            kind=kind, hidden_size=hidden, vocab_size=vocab, projection=3 * shape.hidden_size * hidden,
            own_vocab=vocab * hidden,
        )  # fmt: skip
    else:
        mixer, typical = costs[0].mixer, typical_drafter(shape, kind)
        # the first layer's q, k and v read two vectors
        wider = replace(mixer, weights=2 * mixer.weights - mixer.entry_work // 2 * hidden)
        layers[0] = LayerGroup(1, replace(costs[0], mixer=wider))
        projection = typical.projection // shape.hidden_size * hidden
        built = replace(typical, vocab_size=vocab, projection=projection, own_vocab=vocab * hidden)
    built = replace(built, layers=tuple(layers), hidden_size=hidden, assumed=False, source=name)
    return _replace_drafter(shape, built)


def from_head(shape: ModelShape, head: HeadCheckpoint, name: str) -> ModelShape:
    """Returns the shape with a head in headstart's layout; bytes per weight come from its tensors."""
    hidden, spec, ids = shape.hidden_size, head.spec, head.draft_token_ids
    layers: tuple[LayerGroup, ...] = ()
    if spec.layer is not None:
        layers = (LayerGroup(spec.block.num_layers if spec.block else 1, spec.layer.cost(hidden)),)
    built = DrafterShape(
        kind=spec.kind, hidden_size=hidden, vocab_size=shape.vocab_size if ids is None else len(ids), layers=layers,
        projection=2 * hidden * hidden if layers else 0, num_modules=spec.num_modules if layers else 1,
        per_token=0 if layers else hidden * hidden, single_pass=not layers,
        max_depth=None if layers else spec.num_modules, source=name,
    )  # fmt: skip
    built = as_block(built, spec)
    num_bytes = sum(in_memory(tensor).nbytes for tensor in head.tensors.values())
    return _replace_drafter(shape, built, num_bytes / max(built.parameters, 1))


def as_block(built: DrafterShape, spec: HeadSpec) -> DrafterShape:
    """Returns the drafter as a block drafter, if `spec` declares one."""
    if not (block := spec.block):
        return built
    kind, every = "dspark" if block.anchor_predicts else "dflash", head_kind(spec.kind).shapes(spec, built.hidden_size)
    built = replace(built, kind=kind, projection=0, single_pass=True, max_depth=block.block_size)
    built = _with_markov(built, block.markov_rank)
    return replace(built, projection=num_elements(every) - built.parameters)


def _replace_drafter(shape: ModelShape, drafter: DrafterShape, weight_bytes: float = FLOAT_BYTES) -> ModelShape:
    """Returns the shape with another drafter of `weight_bytes` per weight, without its own head's acceptances."""
    sizes = {**shape.bytes_per_weight, "head": weight_bytes}
    return replace(shape, drafter=drafter, bytes_per_weight=sizes, acceptance=(), acceptance_source="")


def describe_drafter(drafter: DrafterShape) -> str:
    """Describes the drafter and the assumptions about it, in one line."""
    if not drafter.can_draft:
        return "no drafter"
    if drafter.kind == "mtp" and drafter.assumed:
        return "drafter: the model has no MTP head; one block, as `headstart train` gives a head, is assumed"
    known = DRAFTER_TYPES.get(drafter.kind)
    source = f", {drafter.source}" if drafter.source else ""
    note = "; the model comes without one" if drafter.assumed else ""
    return f"drafter: {known.title if known else drafter.kind}{source}{note}"
