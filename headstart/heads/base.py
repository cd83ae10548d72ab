"""`HeadSpec`, `Head`, `HeadNetwork`: what a head declares, its loaded modules, and its programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from headstart.config import MAX_DEPTH
from headstart.errors import ModelError
from headstart.kernels.ops import Buffer, KVSpec, Ops, Pool, RawTensor, StepInputs, Weight
from headstart.kernels.specs import StateSpec
from headstart.layers.attention import Attention
from headstart.layers.decoder import DecoderLayer, LayerConfig, Tap, join_pools, tap_width
from headstart.layers.linear import Linear, LMHead
from headstart.layers.network import NetworkProgram, Pools

FIRST_PAIR_POSITION = 1  # the pair (h_p, t_{p+1}) lives at position p + 1, so pair 0 is at 1
STATES = "states"


MAX_MODULES = 64
MAX_LAYERS, MAX_RANK = 16, 4096  # more layers, or a larger rank, are a mistake in a config
Markov = Literal["vanilla", "gated", "rnn", "selector"]
MARKOV: tuple[Markov, ...] = get_args(Markov)
"""Forms of a Markov head (heads/block.py); `selector` is DFlash2's."""


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A block drafter (heads/block.py). Raises ModelError, naming the value, for one out of its range."""

    block_size: int  # most tokens that a pass drafts
    num_layers: int
    mask_token_id: int
    causal: bool  # rows of a block see the block up to themselves
    anchor_predicts: bool  # the row of the last token drafts too (DSpark), not only those of the mask (DFlash)
    windows: tuple[int, ...] = ()  # of each layer, 0 for none; empty: no layer has one
    causal_windows: bool = False  # layers with a window are causal anyway
    sinks: bool = False  # attention has sinks
    interleaved: bool = False  # the file has the two halves of a rotary pair side by side
    tap_norms: bool = False  # each tap is normed before they are fused
    mask_embedding: bool = False  # the mask has an embedding of its own
    markov_rank: int = 0
    markov_kind: str = "vanilla"  # one of MARKOV
    top_k: int = 0  # tokens of the largest logits, among which a selector chooses
    conv_taps: int = 0  # of the convolutions around each part of a layer (DFlash2); 0: there are none
    conv_group: int = 1  # neighbouring features that share a dynamic kernel
    confidence: bool = False
    confidence_markov: bool = True  # the confidence head reads the Markov embedding too
    embedding_scale: float = 1.0  # of the rows of a block
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # of scaled logits, as Decoder's; 0: none
    vocab_size: int = 0  # tokens that the Markov head reads; 0: not known yet
    draft_vocab_size: int = 0  # tokens that the Markov head biases; 0: not known yet

    def __post_init__(self) -> None:
        self._check("block_size", 1, MAX_DEPTH, "the tokens that one pass drafts")
        self._check("num_layers", 1, MAX_LAYERS)
        self._check("markov_rank", 0, MAX_RANK)
        self._check("mask_token_id", 0, (self.vocab_size or 2**31) - 1, "an id of the vocabulary")
        self._check("conv_taps", 0, MAX_DEPTH)
        self._check("conv_group", 1, 2**31)
        if self.markov_kind not in MARKOV:
            raise ModelError(f"the block drafter's markov_kind is {self.markov_kind!r}", f"known: {', '.join(MARKOV)}")
        self._check("top_k", int(self.markov_kind == "selector"), self.draft_vocab_size or 2**31)
        if len(self.windows) not in (0, self.num_layers) or min(self.windows, default=0) < 0:
            raise ModelError(f"the block drafter's windows are {self.windows}, for {self.num_layers} layers")
        if not (math.isfinite(self.logit_scale) and self.logit_scale > 0):
            raise ModelError(f"the block drafter's logit_scale is {self.logit_scale}, but must be above 0")

    def _check(self, name: str, least: int, most: int, what: str = "") -> None:
        value = getattr(self, name)
        if not least <= value <= most:
            why = f" ({what})" if what else ""
            raise ModelError(f"the block drafter's {name} is {value}, but must be {least} to {most}{why}")

    def window(self, layer: int) -> int:
        """Of a layer; 0: it sees everything."""
        return self.windows[layer] if self.windows else 0

    def is_causal(self, layer: int) -> bool:
        """Does a row see the block up to itself only, in this layer?"""
        return self.causal or (self.causal_windows and self.window(layer) > 0)

    @property
    def all_causal(self) -> bool:
        """Does no row depend on a later one of its block?"""
        return all(map(self.is_causal, range(self.num_layers)))

    def rows_for(self, depth: int) -> int:
        """Rows that a draft of so many tokens takes."""
        return depth if self.anchor_predicts else depth + 1


@dataclass(frozen=True, kw_only=True)
class ReaderSpec:
    """What a head declares whose layers have queries only (heads/assistant.py). `layers`: each reads the keys and
    values of the trunk's last layer of its kind. `hidden_size`: columns of its stream. `eps`: of its last norm.
    `num_groups`: of its LM head's tokens, of which a row keeps `top_groups`; 0: all. What a trunk adds:
    `embedding_scale`, of the trunk's embeddings, and `reads`, of each layer the place of the pool among the trunk's."""

    layers: tuple[LayerConfig, ...]
    hidden_size: int
    eps: float
    num_groups: int = 0
    top_groups: int = 0
    embedding_scale: float = 1.0
    reads: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A head's formula, as its file, modules, drafter and trainer share it."""

    kind: str = "mtp"
    layer: LayerConfig | None = None  # the block of each module; None: the family's or the kind's own
    num_modules: int = 1
    hidden_first: bool = False  # concat order [h ; e] instead of [e ; h]
    mask_first: bool = False  # the embedding of pair 0 is zeroed
    tap: Tap = "post_norm"  # the trunk's hidden state that is read
    recycle: Literal["post_norm", "pre_norm", "streams"] = "post_norm"  # the vector that the next draft step reads
    # the module of draft steps past the last one; None: such depths are refused, unless there is one module
    beyond: Literal["last", "cycle"] | None = None
    output_norm: bool = True  # the block's output is normed before the LM head
    own_lm_head: int = 0  # rows of each module's own LM head; 0: the trunk's LM head
    norm_before_residual: bool = False  # EAGLE-3: the residual is the normed state
    num_layers: int = 1  # of EAGLE heads; the further ones are blocks of the trunk's form (further_layer)
    block: BlockSpec | None = None  # of a drafter that drafts a block in one pass
    reader: ReaderSpec | None = None  # of a head that reads the trunk's keys; all steps stand at the newest position

    def module_of(self, step: int) -> int | None:
        """The module that serves draft step `step` (0-based); None when the head declares none."""
        if step < self.num_modules:
            return step
        if self.num_modules == 1 or self.beyond == "last":
            return self.num_modules - 1
        return step % self.num_modules if self.beyond == "cycle" else None

    def rows_before(self, step: int) -> int:
        """Rows that lie between the true pairs and the row of draft step `step` >= 1 in the KV of the step's module: of
        earlier steps that the same module served. -1: it stands where the newest pair does."""
        if self.reader:
            return -1
        return sum(self.module_of(each) == self.module_of(step) for each in range(1, step))

    @property
    def num_streams(self) -> int:
        """Residual streams of its block."""
        return self.layer.streams.count if self.layer and self.layer.streams else 1

    def read_width(self, hidden_size: int, *, recycled: bool) -> int:
        """Columns of what a draft step reads: a stored state, or a recycled vector."""
        if recycled:
            return hidden_size * (self.num_streams if self.recycle == "streams" else 1)
        return tap_width(self.tap, hidden_size, self.num_streams)

    @property
    def depth_limit(self) -> int:
        """The deepest draft it declares a module, or rows, for."""
        if self.block:
            return self.block.block_size
        return next((step for step in range(MAX_DEPTH) if self.module_of(step) is None), MAX_DEPTH)


class Module(Protocol):
    """One draft step's computation; each kind of head has its own."""

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """A pool each; none: it keeps nothing between rounds."""

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """Embedded tokens [R, H] and step.hidden (stored [R, tap width], or recycled [R, H]) -> (y for the LM head,
        what the next step reads [R, H]). `pool`: its own, or the list of the trunk's that HeadSpec.reader names."""


@dataclass(frozen=True)
class Head:
    """A head that fits its trunk: modules as its drafter runs them (for drafter `head`, Module), their source, draft
    vocabulary (ascending target ids; None: the full one). `lm_head` and `embedding` None: the trunk's. `lm_heads`: of
    modules with their own. `lm_rows`: its LM head as in its file, of which some rows may be wanted."""

    spec: HeadSpec
    modules: Sequence[Any]
    source: str
    draft_token_ids: NDArray[np.int64] | None = None
    lm_head: Linear | None = None
    embedding: Weight | None = None
    lm_heads: Sequence[LMHead] = ()
    lm_rows: RawTensor | None = None


@dataclass(frozen=True)
class HeadNetwork:
    """A head beside its trunk: the pair (h_p, t_{p+1}) lives at position p + 1 and reads the state of position p.
    `lm_heads`: one for all modules, or one each."""

    head: Head
    hidden_size: int
    embedding: Weight
    lm_heads: Sequence[LMHead]
    hidden_offset: int = FIRST_PAIR_POSITION
    state_specs: tuple[StateSpec, ...] = ()

    @property
    def first_position(self) -> int:
        """The trunk's keys begin at 0."""
        return 0 if self.head.spec.reader else FIRST_PAIR_POSITION

    @property
    def kv_specs(self) -> Sequence[KVSpec]:
        return [spec for module in self.head.modules for spec in module.kv_specs]

    def programs(self, pools: Pools) -> Mapping[str, NetworkProgram]:
        """Of module i: `pairs.i`, a draft step from stored trunk states, and `next.i`, one from recycled vectors; and
        STATES, what the first module gives the LM head."""
        kv, programs, spec = iter(pools.kv), {}, self.head.spec
        reader = spec.reader
        read = [pools.trunk[place] for place in reader.reads] if reader else None
        for index, module in enumerate(self.head.modules):
            pool = read if read is not None else join_pools([next(kv) for _ in module.kv_specs])
            lm_head = self.lm_heads[min(index, len(self.lm_heads) - 1)]
            code = DraftStep(self.head.spec, module, pool, self.embedding, lm_head)
            stored, recycled = (spec.read_width(self.hidden_size, recycled=each) for each in (False, True))
            programs[f"pairs.{index}"] = NetworkProgram(code, stored)
            programs[f"next.{index}"] = NetworkProgram(replace(code, recycled=True), recycled)
            if index == 0:
                states = NetworkProgram(replace(code, lm_head=None), stored)
                programs[STATES] = states
        return programs


@dataclass(frozen=True)
class DraftStep:
    """All rows of a draft step. Results: `logits` [L, V'], `hidden` [R, H] (the recycled vector). Without an LM head:
    `states` [R, H], what it would read."""

    spec: HeadSpec
    module: Module
    pool: Pool
    embedding: Weight
    lm_head: LMHead | None
    recycled: bool = False

    def __call__(self, ops: Ops, step: StepInputs) -> dict[str, Buffer]:
        embedded = ops.embed(self.embedding, step.token_ids)
        y, recycled = self.module.forward(ops, self.spec, embedded, step, self.pool, recycled=self.recycled)
        if self.lm_head is None:
            return {"states": y}
        return {"logits": self.lm_head(ops, ops.take_rows(y, step.logit_rows)), "hidden": recycled}


WINDOW_LIMIT = 1024
"""Positions up to its own that a row of a head sees. The trunk's hidden state has seen the whole text: beyond 6,500
positions heads accept as much with the latest 256 positions as with all (docs/log)."""


def limit_window(modules: Iterable[Any], positions: int = WINDOW_LIMIT) -> list[Any]:
    """Draft modules whose attention layers see at most so many positions; latent attention (MLA), chunked attention,
    and modules of plug-ins that are no dataclasses stay as they are."""
    return [_limited(module, positions) if module.kv_specs and is_dataclass(module) else module for module in modules]


def _limited(module: Any, positions: int) -> Any:
    changed: dict[str, Any] = {}
    for field in fields(module):
        value = getattr(module, field.name)
        if isinstance(value, DecoderLayer):
            changed[field.name] = _limited_layer(value, positions)
        elif isinstance(value, list | tuple) and value and all(isinstance(each, DecoderLayer) for each in value):
            changed[field.name] = [_limited_layer(each, positions) for each in value]
    return replace(module, **changed)


def _limited_layer(layer: DecoderLayer, positions: int) -> DecoderLayer:
    mixer = layer.mixer
    if not isinstance(mixer, Attention) or mixer.config.spec.chunk or 0 < mixer.config.spec.window <= positions:
        return layer
    config = replace(mixer.config, spec=replace(mixer.config.spec, window=positions))
    return replace(layer, mixer=replace(mixer, config=config))
