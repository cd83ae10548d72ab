"""`HeadSpec`: a head's declaration; `Head`: its loaded modules; `HeadNetwork`: its programs."""

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
from headstart.layers.decoder import DecoderLayer, LayerConfig, Tap, tap_width
from headstart.layers.linear import Linear, LMHead, scale
from headstart.layers.network import NetworkProgram, Pools
from headstart.layers.parts import join_pools

FIRST_PAIR_POSITION = 1  # the pair (h_p, t_{p+1}) lives at position p + 1, so pair 0 is at 1
STATES = "states"  # program whose output `states` is the input of the LM head


MAX_MODULES = 64
MAX_LAYERS, MAX_RANK = 16, 4096  # a config with more layers, or a larger Markov rank, is refused as damaged
Markov = Literal["vanilla", "gated", "rnn", "selector"]
MARKOV: tuple[Markov, ...] = get_args(Markov)
"""Forms of a Markov head (heads/block.py); `selector` is DFlash2's."""


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A block drafter (heads/block.py). Raises ModelError naming the field whose value is out of range."""

    block_size: int  # maximum tokens that one pass drafts
    num_layers: int
    mask_token_id: int
    causal: bool  # a row attends to its block up to itself; False: to the whole block
    anchor_predicts: bool  # the row of the last committed token drafts, too (DSpark); False: only mask rows (DFlash)
    windows: tuple[int, ...] = ()  # sliding window of each layer, 0: unlimited; empty: all unlimited
    causal_windows: bool = False  # layers with a window are causal even if `causal` is False
    sinks: bool = False  # attention has sinks
    interleaved: bool = False  # the file stores the two elements of a rotary pair next to each other
    mask_embedding: bool = False  # the mask token's embedding is the tensor `mask_embedding`
    markov_rank: int = 0  # columns of the Markov head's tables; 0: no Markov head
    markov_kind: str = "vanilla"  # one of MARKOV
    top_k: int = 0  # number of largest logits that a selector keeps
    conv_taps: int = 0  # taps of the convolutions around attention and MLP (DFlash2); 0: no convolutions
    conv_group: int = 1  # neighbouring features that share a dynamic kernel
    confidence: bool = False  # has a confidence head
    in_checkpoint: bool = False  # its tensors are in the trunk's files, under `mtp.{i}` (heads/block.py)
    confidence_markov: bool = True  # the confidence head reads the Markov embedding, too
    embedding_scale: float = 1.0  # factor on the embeddings of a block's rows
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # cap of the scaled logits, as in Decoder; 0: none
    vocab_size: int = 0  # tokens that the Markov head reads; 0: not known yet
    draft_vocab_size: int = 0  # tokens whose logits the Markov head changes; 0: not known yet

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
        """Sliding window of a layer in positions; 0: unlimited."""
        return self.windows[layer] if self.windows else 0

    def is_causal(self, layer: int) -> bool:
        """True if rows of this layer attend to their block only up to themselves."""
        return self.causal or (self.causal_windows and self.window(layer) > 0)

    @property
    def all_causal(self) -> bool:
        """True if no row depends on a later row of its block."""
        return all(map(self.is_causal, range(self.num_layers)))

    def rows_for(self, depth: int) -> int:
        """Number of rows in the pass that drafts `depth` tokens."""
        return depth if self.anchor_predicts else depth + 1


@dataclass(frozen=True, kw_only=True)
class ReaderSpec:
    """A head of query-only layers over the trunk's KV (heads/assistant.py). `fit` sets the last two fields."""

    layers: tuple[LayerConfig, ...]
    hidden_size: int  # width of the head's own stream
    eps: float  # of the final norm
    num_groups: int = 0  # groups of tokens in the LM head; 0: no groups
    top_groups: int = 0  # groups whose logits a row keeps
    embedding_scale: float = 1.0  # factor on the trunk's embeddings
    reads: tuple[int, ...] = ()  # index of the trunk's KV pool that each layer reads


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Declaration of a head, shared by its file, modules, drafter and trainer."""

    kind: str = "mtp"  # name of a file of heads/
    layer: LayerConfig | None = None  # the block of each module; None: the kind has no such block
    layers: tuple[LayerConfig, ...] = ()  # the blocks of all modules, where they differ
    num_modules: int = 1
    chained: bool = False  # module i > 0 reads module i - 1's output and the token i positions further on, at all pairs
    hidden_first: bool = False  # concat order [h ; e] instead of [e ; h]
    mask_first: bool = False  # the embedding of pair 0 is zeroed
    tap: Tap = "post_norm"  # the trunk's hidden state that the head reads
    recycle: Literal["post_norm", "pre_norm", "streams"] = "post_norm"  # the vector that the next draft step reads
    # the module of draft steps past the last one; None: such depths are refused, unless there is one module
    beyond: Literal["last", "cycle"] | None = None
    output_norm: bool = True  # the block's output is normalized before the LM head
    embed_norm: bool = False  # embeddings have the trunk's norm (`embed_norm`) before the module's own
    logit_scale: float = 1.0  # multiplies logits, as in the trunk
    joint_norm: bool = False  # the norm of all streams of the trunk is one
    own_lm_head: int = 0  # rows of each module's own LM head; 0: the trunk's LM head
    norm_before_residual: bool = False  # EAGLE-3: the residual is the normalized state
    num_layers: int = 1  # layers of an EAGLE head; see heads.kind.further_layers for those after the first
    block: BlockSpec | None = None  # set for drafters that draft a block in one pass
    reader: ReaderSpec | None = None  # set for heads that read the trunk's keys; each step is at the newest position

    def block_of(self, module: int) -> LayerConfig:
        """The block of a module of a kind whose modules have one."""
        layer = self.layers[module] if self.layers else self.layer
        assert layer is not None
        return layer

    @property
    def is_chain(self) -> bool:
        """True if modules read each other's outputs (`chained`); a single one reads its own."""
        return self.chained and self.num_modules > 1

    def module_of(self, step: int) -> int | None:
        """Index of the module that runs draft step `step` (0-based); None if the head declares none."""
        if step < self.num_modules:
            return step
        if self.num_modules == 1 or self.beyond == "last":
            return self.num_modules - 1
        return step % self.num_modules if self.beyond == "cycle" else None

    def rows_before(self, step: int) -> int:
        """Number of rows between the committed pairs and the row of draft step `step` >= 1 in the KV of the step's
        module: those of earlier steps by the same module. -1: the step's row has the newest pair's position."""
        if self.reader:
            return -1
        return sum(self.module_of(each) == self.module_of(step) for each in range(1, step))

    @property
    def num_streams(self) -> int:
        """Number of residual streams of the head's block."""
        return self.layer.streams.count if self.layer and self.layer.streams else 1

    def read_width(self, hidden_size: int, *, recycled: bool) -> int:
        """Columns of the vector that a draft step reads: the trunk's stored state, or the recycled vector."""
        if recycled:
            return hidden_size * (self.num_streams if self.recycle == "streams" else 1)
        return tap_width(self.tap, hidden_size, self.num_streams)

    @property
    def depth_limit(self) -> int:
        """Maximum number of drafted tokens."""
        if self.block:
            return self.block.block_size
        return next((step for step in range(MAX_DEPTH) if self.module_of(step) is None), MAX_DEPTH)


class Module(Protocol):
    """One draft step's computation; each kind of head has its own."""

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """One spec for each KV pool of the module; empty: the module has no KV."""

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """Embedded tokens [R, H] and step.hidden (stored [R, tap width], or recycled [R, H]) -> (input of the LM head,
        recycled vector for the next step [R, H]). `pool`: the module's own, or the trunk's pools (ReaderSpec.reads)."""


@dataclass(frozen=True)
class Head:
    """A loaded head that fits its trunk."""

    spec: HeadSpec
    modules: Sequence[Any]  # of the type that the drafter runs: `Module` for drafter `head`
    source: str  # path of the head, or "the checkpoint" for the trunk's own
    draft_token_ids: NDArray[np.int64] | None = None  # [V'] ascending target ids; None: the full vocabulary
    lm_head: Linear | None = None  # None: the trunk's
    embedding: Weight | None = None  # None: the trunk's
    lm_heads: Sequence[LMHead] = ()  # one for each module, if modules have their own
    lm_rows: RawTensor | None = None  # the LM head's rows as in the file, to select a part of them


@dataclass(frozen=True)
class HeadNetwork:
    """Network of a head. The pair (h_p, t_{p+1}) is at position p + 1 and reads the trunk's state of position p.
    lm_heads: one for all modules, or one for each."""

    head: Head
    hidden_size: int
    embedding: Weight
    lm_heads: Sequence[LMHead]
    hidden_offset: int = FIRST_PAIR_POSITION

    @property
    def first_position(self) -> int:
        """A head that reads the trunk's KV starts at 0, where that starts; other heads start at their first pair."""
        return 0 if self.head.spec.reader else FIRST_PAIR_POSITION

    @property
    def num_recomputed(self) -> int:
        """See Network. In a chain the last module's newest rows read drafted tokens."""
        spec = self.head.spec
        return spec.num_modules - 1 if spec.is_chain else int(bool(self.state_specs))

    @property
    def kv_specs(self) -> Sequence[KVSpec]:
        return [spec for module in self.head.modules for spec in module.kv_specs]

    @property
    def state_specs(self) -> Sequence[StateSpec]:
        return [spec for module in self.head.modules for spec in states_of(module)]

    def programs(self, pools: Pools) -> Mapping[str, NetworkProgram]:
        """Programs of each module i: `pairs.i` is a draft step from stored trunk states, `next.i` one from recycled
        vectors. STATES: the first module's input of the LM head."""
        kv, states, programs, spec = iter(pools.kv), iter(pools.states), {}, self.head.spec
        reader = spec.reader
        read = [pools.trunk[place] for place in reader.reads] if reader else None
        for index, module in enumerate(self.head.modules):
            own = [*(next(kv) for _ in module.kv_specs), *(next(states) for _ in states_of(module))]
            pool = join_pools(own) if read is None else read
            lm_head = self.lm_heads[min(index, len(self.lm_heads) - 1)]
            code = DraftStep(self.head.spec, module, pool, self.embedding, lm_head)
            stored, recycled = (spec.read_width(self.hidden_size, recycled=each) for each in (False, True))
            programs[f"pairs.{index}"] = NetworkProgram(code, stored)
            programs[f"next.{index}"] = NetworkProgram(replace(code, recycled=True), recycled)
            if index == 0:
                programs[STATES] = NetworkProgram(replace(code, lm_head=None), stored)
        return programs


@dataclass(frozen=True)
class DraftStep:
    """Program of a draft step. Outputs: `logits` [L, V'], `hidden` [R, H] (the recycled vector). If lm_head is None:
    `states` [R, H], the input of the LM head."""

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
        y = scale(ops, ops.take_rows(y, step.logit_rows), self.spec.logit_scale)
        return {"logits": self.lm_head(ops, y), "hidden": recycled}


def states_of(module: Any) -> Sequence[StateSpec]:
    """Specs of a module's recurrent states, one pool each; most kinds have none."""
    return getattr(module, "state_specs", ())


WINDOW_LIMIT = 1024
"""Sliding window of heads in positions. The trunk's hidden state already covers the whole text: beyond position 6,500,
acceptance with a window of 256 equals that without a window (docs/log)."""


def limit_window(modules: Iterable[Any], positions: int = WINDOW_LIMIT) -> list[Any]:
    """Copies of draft modules whose attention layers have a window of at most `positions`. Latent attention (MLA),
    attention in chunks or with an indexer, and modules of plug-ins that are no dataclasses stay unlimited."""
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
    if not isinstance(mixer, Attention) or mixer.config.spec.chunk or mixer.config.indexer:
        return layer
    if 0 < mixer.config.spec.window <= positions:
        return layer
    config = replace(mixer.config, spec=replace(mixer.config.spec, window=positions))
    return replace(layer, mixer=replace(mixer, config=config))
