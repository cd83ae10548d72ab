"""Sizes of a model for `plan`: layer costs (layers/costs.py), drafter, weight and cache formats, device memory."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import floor
from typing import Any, Literal

from headstart.errors import UsageError
from headstart.formats.gguf_file import BLOCKS
from headstart.formats.quantization import WeightBytes, bits_of, declared, quantizations, settings_of
from headstart.formats.sizes import lookup, text_config
from headstart.layers.costs import LayerCost
from headstart.tools.plan.machine import Machine

Part = Literal["attention", "mlp", "experts", "lm_head", "embedding", "head"]
GGUF: Mapping[str, WeightBytes] = {
    **{
        kind.lower(): WeightBytes(size, size, size, size, "int8")
        for kind, count, nbytes in BLOCKS.values()
        for size in [nbytes / count]
        if kind.startswith(("Q", "IQ", "TQ"))
    },
    "q4_0": WeightBytes(0.5625, 0.5625, 0.5625, 0.8203, "int8"),
    "q4_1": WeightBytes(0.625, 0.625, 0.625, 1.0625, "int8"),
    "q4_k_m": WeightBytes(0.6, 0.6, 0.6, 0.82, "int8"),
}
ACTIVATION_BYTES = 2
KV_BYTES: Mapping[str, float] = {
    "float32": 4, "bf16": 2, "bfloat16": 2, "float16": 2, "auto": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
    "int4": 0.5625,
}  # fmt: skip


@dataclass(frozen=True)
class LayerGroup:
    """`count` layers of equal cost."""

    count: int
    cost: LayerCost


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Sizes of a drafter. One draft step reads the projection, `layers` and the LM head, and drafts one token."""

    kind: str  # key of drafters.DRAFTER_TYPES
    hidden_size: int
    vocab_size: int  # rows of the LM head; 0: none (n-gram lookup)
    layers: tuple[LayerGroup, ...] = ()  # of one module
    projection: int = 0  # weights of one module outside the layers
    num_modules: int = 1  # stored modules; a draft step reads one
    per_token: int = 0  # additional weights read per drafted token, stored for each depth
    shared_per_token: int = 0  # additional weights read per drafted token, stored once (part of `own_vocab`)
    own_vocab: int = 0  # weights of the drafter's own embedding and LM heads
    single_pass: bool = False  # one step drafts all tokens, with a row for each
    max_depth: int | None = None  # None: no limit
    assumed: bool = False  # the model has no drafter; this one is typical of its kind
    source: str = ""

    @property
    def parameters(self) -> int:
        """Number of stored weights, without an LM head that is shared with the trunk."""
        module = sum(group.count * group.cost.weights for group in self.layers) + self.projection
        return self.num_modules * module + (self.max_depth or 0) * self.per_token + self.own_vocab

    @property
    def can_draft(self) -> bool:
        return self.vocab_size > 0 or self.max_depth != 0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    name: str
    hidden_size: int
    vocab_size: int
    tied: bool
    layers: tuple[LayerGroup, ...]
    drafter: DrafterShape
    weight_format: str  # name of the checkpoint's format
    outer: int = 0  # weights outside the layers that every row reads
    embedding: int = 0  # weights of embedding tables; a tied embedding counts as LM head
    max_length: int | None = None  # context; None: not known
    bytes_per_weight: Mapping[Part, float] = field(default_factory=dict)  # measured; other parts as in the format
    acceptance: tuple[float, ...] = ()  # of the model's own drafter: conditional, by position
    acceptance_source: str = ""
    notes: tuple[str, ...] = ()  # sources and assumptions

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.layers)

    def parameters(self) -> dict[Part, int]:
        """Returns the number of weights by part; `head` is the drafter, without a shared LM head."""
        costs = [(group.count, group.cost.mixer, group.cost.feed_forward) for group in self.layers]
        return {
            "attention": sum(count * mixer.weights for count, mixer, _ in costs),
            "mlp": sum(count * feed.weights for count, _, feed in costs) + self.outer,
            "experts": sum(count * feed.experts * feed.expert_weights for count, _, feed in costs),
            "lm_head": self.vocab_size * self.hidden_size,
            "embedding": self.embedding + sum(count * feed.tables for count, _, feed in costs),
            "head": self.drafter.parameters,
        }

    def active_parameters(self) -> int:
        """Returns the number of weights that the trunk uses for one token, including the LM head."""
        layers = sum(group.count * group.cost.active_weights for group in self.layers)
        return layers + self.outer + self.vocab_size * self.hidden_size

    def with_notes(self, *notes: str) -> "ModelShape":
        return replace(self, notes=(*self.notes, *notes))


@dataclass(frozen=True, kw_only=True)
class SizedModel:
    """A model's shape with the formats of weights and cache."""

    shape: ModelShape
    kv: float  # bytes per cached element

    @property
    def format(self) -> WeightBytes:
        return weight_format(self.shape.weight_format)

    def bytes(self, part: Part) -> float:
        """Returns the bytes per weight of a part: measured in the checkpoint, else the format's."""
        by_format = getattr(self.format, part) if part in ("attention", "mlp", "experts") else self.format.lm_head
        return self.shape.bytes_per_weight.get(part, by_format)

    def drafter_model(self) -> "SizedModel":
        """Returns the drafter as a model, whose bytes per weight are those of the head (often not quantized)."""
        shape = replace(self.shape, hidden_size=self.shape.drafter.hidden_size)
        size = self.shape.bytes_per_weight.get("head", self.format.head)
        if size is not None:
            measured: dict[Part, float] = {"attention": size, "mlp": size, "experts": size}
            shape = replace(shape, bytes_per_weight={**shape.bytes_per_weight, **measured})
        return replace(self, shape=shape)

    def weight_bytes(self) -> dict[Part, float]:
        """Returns the bytes of all weights by part; `head` without a shared LM head."""
        sizes: dict[Part, float] = {part: count * self.bytes(part) for part, count in self.shape.parameters().items()}
        drafter, model = self.shape.drafter, self.drafter_model()
        module = sum(model.layer_bytes(group) for group in drafter.layers) + drafter.projection * model.bytes("mlp")
        per_token = (drafter.max_depth or 0) * drafter.per_token * model.bytes("mlp")
        sizes["head"] = drafter.num_modules * module + per_token + drafter.own_vocab * self.bytes("lm_head")
        return sizes

    def layer_bytes(self, group: LayerGroup, rows: float | None = None) -> float:
        """Returns the bytes of a group's weights, with the expected experts of `rows` rows (None: all experts)."""
        mixer, feed = group.cost.mixer, group.cost.feed_forward
        experts = feed.experts if rows is None else feed.touched(rows)
        return group.count * (
            mixer.weights * self.bytes("attention")
            + (feed.weights + (feed.tables if rows is None else 0)) * self.bytes("mlp")
            + experts * feed.expert_weights * self.bytes("experts")
        )


@cache
def weight_format(name: str) -> WeightBytes:
    """Returns a weight format by name: bf16, a quantization's or GGUF's. Raises UsageError for an unknown name."""
    named = {name: each for quantization in quantizations().values() for name, each in quantization.plans.items()}
    known = {"bf16": WeightBytes(2, 2, 2, 2), **named, **GGUF}
    if name not in known:
        raise UsageError(f"--weights is {name!r}, which is not known", f"known: {', '.join(known)}")
    return known[name]


def declared_format(config: Mapping[str, Any]) -> str:
    """Returns the name of the weight format that a config.json's quantization_config declares: by its types of weights
    and experts, else by its method. bf16 without a quantization, or for an unknown one."""
    quantization, settings = declared(config), settings_of(config)
    if quantization is None:  # MLX names no method
        plain = "quant_method" in settings or "bits" not in settings
        return "bf16" if plain else "int8" if bits_of(settings) == 8 else "mlx4"
    experts = str(settings.get("expert_dtype") or text_config(config).get("expert_dtype") or "").lower()
    if "fp8" in quantization.plans and experts in ("fp4", "mxfp4"):
        return "fp4-fp8"
    groups = settings.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = lookup(first, "weights") if isinstance(first, Mapping) else None
    if isinstance(weights, Mapping) and weights.get("type") == "float":
        small = "mxfp4" if weights.get("group_size") == 32 else "nvfp4"
        return small if weights.get("num_bits") == 4 else "fp8"
    if (quantization.bits == 4 and bits_of(settings) == 8) or settings.get("load_in_8bit"):
        return "int8"
    return next(iter(quantization.plans), f"int{8 if bits_of(settings) > 4 else 4}")


def pass_rows(device: float) -> int:
    """Returns the rows of the largest pass that engines reserve memory for on a device of this many bytes."""
    return 8192 if device >= LARGE_DEVICE else 2048


def kv_bytes(name: str) -> float:
    if name not in KV_BYTES:
        raise UsageError(f"--kv-dtype is {name!r}, which is not known", f"known: {', '.join(KV_BYTES)}")
    return KV_BYTES[name]


Verdict = Literal["fits", "close", "too small"]

USABLE = 0.9
"""Share of a device's memory that engines use by default for weights, activations and caches."""
LIMIT = 0.97  # largest share of a device's memory that engines can be configured to use
LARGE_DEVICE = 70e9  # bytes
LOGIT_ROWS = 256  # rows with logits in the largest pass
LOGIT_BYTES = 8  # per logit: float32, and a copy while sampling
MIN_CONTEXT = 1024  # smallest useful context, in positions
MAX_CONTEXT = 2**40


@dataclass(frozen=True, kw_only=True)
class Split:
    """Division of a model over devices."""

    device: float  # memory of one device, in bytes
    tp: int = 1  # devices that share attention, dense matrices and caches
    ep: int = 1  # devices that share experts; 1: tp
    replicas: int = 1  # groups of tp devices, each with sequences of its own


def split_of(machine: Machine) -> Split:
    return Split(device=machine.device.memory, tp=machine.tp, ep=machine.ep, replicas=machine.replicas)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one device, and the number of sequences that fit. For a model of unknown sizes only weights count."""

    device: float  # memory of the device
    weights: float  # drafter included
    replicas: int
    activations: float = 0.0  # of the largest pass
    per_sequence: float = 0.0  # cache of one sequence at the requested context
    min_sequence: float = 0.0  # cache of one sequence of MIN_CONTEXT positions
    users: int = 1  # requested sequences
    max_context: int | None = None  # longest single sequence within USABLE; None: unknown sizes, or no limit

    @property
    def usable(self) -> float:
        return USABLE * self.device

    @property
    def free(self) -> float:
        """Bytes left for caches; negative if the weights are too large."""
        return self.usable - self.weights - self.activations

    @property
    def fits(self) -> bool:
        return self.free >= 0

    @property
    def max_batch(self) -> int:
        """Number of sequences of the requested context that fit on all devices together."""
        return self.replicas * floor(self.free / max(self.per_sequence, 1.0)) if self.fits else 0

    @property
    def verdict(self) -> Verdict:
        """`fits`: all requested sequences fit within USABLE. `too small`: not even one sequence of MIN_CONTEXT fits
        within LIMIT. `close`: engines may start with fewer sequences, a shorter context or a larger memory share."""
        if self.fits and self.max_batch >= self.users:
            return "fits"
        least = self.weights + self.activations + self.min_sequence
        return "close" if least <= LIMIT * self.device else "too small"

    @property
    def reason(self) -> str:
        """The reason for the verdict, as text; empty if everything fits."""
        weights, have = self.weights / 1e9, self.device / 1e9
        if self.verdict == "too small":
            return f"the weights take {weights:.1f} GB of each device, which has {have:.0f} GB"
        if not self.fits:
            share = 1 - self.free / self.usable
            return f"weights and activations take {share:.0%} of the memory that engines use of {have:.0f} GB"
        if self.verdict == "fits":
            return ""
        need, free = self.users * self.per_sequence / self.replicas / 1e9, self.free / 1e9
        return (
            f"caches of {self.users} sequences would take {need:.1f} GB of each device and {free:.1f} GB are left: "
            f"room for {self.max_batch} at full length"
            + (f", or for one of {self.max_context:,} positions" if self.max_context is not None else "")
        )


def estimate_memory(
    model: SizedModel, split: Split, context: float, *, users: int = 1, weight_bytes: float | None = None
) -> MemoryEstimate:
    """Estimates the memory of a model with `users` sequences of `context` positions. `weight_bytes`: size of all
    weights in files; None: computed from the model's format."""
    sizes = model.weight_bytes()
    scale = 1.0 if weight_bytes is None else weight_bytes / sum(sizes.values())
    experts = sizes.pop("experts") / (split.ep if split.ep > 1 else split.tp)
    weights = scale * (experts + sum(sizes.values()) / split.tp)
    activated = activations(model.shape, split)
    free = USABLE * split.device - weights - activated
    return MemoryEstimate(
        device=split.device, weights=weights, activations=activated, per_sequence=cache_bytes(model, split, context),
        min_sequence=cache_bytes(model, split, min(context, MIN_CONTEXT)), users=users, replicas=split.replicas,
        max_context=_max_context(model, split, free),
    )  # fmt: skip


def cache_bytes(model: SizedModel, split: Split, context: float) -> float:
    """Returns the bytes of keys, values and float32 states of one sequence on one device, with the drafter's."""
    drafter = model.shape.drafter
    trunk = sum(_cache_of(group, model.kv, split, context) for group in model.shape.layers)
    module = sum(_cache_of(group, model.kv, split, context) for group in drafter.layers)
    return trunk + drafter.num_modules * module


def activations(shape: ModelShape, split: Split) -> float:
    """Returns the activation bytes of the largest pass: hidden states, values of the widest layer, float32 logits."""
    rows = pass_rows(split.device)
    widest = max(_inner(group, shape.hidden_size) for group in shape.layers)
    values = rows * (6 * shape.hidden_size + widest / split.tp) * ACTIVATION_BYTES
    return values + LOGIT_ROWS * shape.vocab_size * LOGIT_BYTES / split.tp


def devices_needed(model: SizedModel, device: float) -> int:
    """Returns the fewest devices with `device` bytes each that hold the weights."""
    return -int(-sum(model.weight_bytes().values()) // (USABLE * device))


def _cache_of(group: LayerGroup, kv: float, split: Split, context: float) -> float:
    mixer = group.cost.mixer
    return group.count * (mixer.cached(context) * kv + 4 * mixer.state) / min(split.tp, mixer.splits)


def _inner(group: LayerGroup, hidden: int) -> float:
    """Returns the number of intermediate values of one row in a feed-forward part, over all experts of the row."""
    feed = group.cost.feed_forward
    return feed.weights / hidden + feed.active * (feed.expert_weights / hidden + hidden)


def _max_context(model: SizedModel, split: Split, free: float) -> int | None:
    """Returns the longest context whose caches take at most `free` bytes of a device; None: no limit."""
    contexts = range(1, MAX_CONTEXT + 1)
    fitting = bisect_right(contexts, free, key=lambda context: cache_bytes(model, split, context))
    return None if fitting == MAX_CONTEXT else fitting
