"""`Network`: interface of a trunk, head, block drafter or draft model to the engine's runner."""

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from headstart.kernels.ops import AttentionSpec, Handle, KVSpec, Pool, Program
from headstart.kernels.specs import ConvSpec, StateSpec
from headstart.layers.decoder import Decoder, Tap


@dataclass(frozen=True)
class Pools:
    """Storage of one network."""

    kv: Seq[Pool]  # one for each of its kv_specs
    states: Seq[Pool] = ()  # one for each of its state_specs
    hidden: Pool = None  # hidden states that a decoder writes and its heads read; None: no network reads them
    trunk: Seq[Pool] = ()  # the trunk's `kv`, which some drafters read


class NetworkProgram(NamedTuple):
    """A program of a network."""

    code: Program
    hidden_width: int = 0  # columns of the stored hidden states that its rows read; 0: none


class Network(Protocol):
    """Layers with KV or states of their own, and programs that run them."""

    @property
    def kv_specs(self) -> Seq[KVSpec]:
        """One KV pool each."""

    @property
    def state_specs(self) -> Seq[StateSpec]:
        """One state pool each."""

    @property
    def first_position(self) -> int:
        """The first position that holds KV."""

    @property
    def hidden_offset(self) -> int | None:
        """A row at position q reads the stored hidden state of position q - hidden_offset; None: its rows read none."""

    @property
    def num_recomputed(self) -> int:
        """Newest positions of a drafter's pass that its next pass computes again; 1 or more with states."""

    def programs(self, pools: Pools) -> Mapping[str, NetworkProgram]:
        """The network's programs over these pools, by name."""


@dataclass(eq=False)
class NetworkHandle:
    """A network on a runner."""

    network: Network
    index: int  # its place in Sequence.filled
    source: "NetworkHandle | None" = None  # the draft model whose hidden states it reads; None: the trunk's
    pools: Pools = Pools(())  # set when memory is sized
    programs: Mapping[str, Handle] = field(default_factory=dict)  # prepared, set when memory is sized

    @property
    def pool_specs(self) -> list[KVSpec]:
        """Specs of the network's KV pools, without windows: a pool keeps all positions."""
        specs = self.network.kv_specs
        return [replace(spec, window=0) if isinstance(spec, AttentionSpec) else spec for spec in specs]

    @property
    def receptive_field(self) -> int:
        """Number of latest positions that a row depends on through all layers; 0: all positions."""
        reaches = [spec.window if isinstance(spec, AttentionSpec) else 0 for spec in self.network.kv_specs]
        reaches += [spec.width - 1 if isinstance(spec, ConvSpec) else 0 for spec in self.network.state_specs]
        return sum(reaches) if all(reaches) else 0


FORWARD = "forward"  # name of a decoder's program over token ids
EMBED, FORWARD_EMBEDDED = "embed", "forward_embedded"
"""The same in two parts, with the input of the first layer between them, for trunks that read images."""


@dataclass(frozen=True)
class DecoderNetwork:
    """A whole decoder: the trunk or a draft model."""

    decoder: Decoder
    tap: Tap | None = None  # hidden states that it stores in pools.hidden
    stored_width: int = 0  # their columns; 0: none
    first_position: int = 0
    hidden_offset: None = None
    embedded_width: int = 0  # see DecoderProgram, for programs whose input may be given; 0: always from token ids

    @property
    def kv_specs(self) -> Seq[KVSpec]:
        return self.decoder.kv_specs

    @property
    def state_specs(self) -> Seq[StateSpec]:
        return self.decoder.state_specs

    @property
    def num_recomputed(self) -> int:
        return int(bool(self.state_specs))

    def programs(self, pools: Pools) -> Mapping[str, NetworkProgram]:
        hidden = pools.hidden if self.tap else None
        code = self.decoder.program(pools.kv, hidden, self.tap or "post_norm", pools.states)
        if not self.embedded_width:
            return {FORWARD: NetworkProgram(code)}
        return {
            FORWARD: NetworkProgram(code),
            EMBED: NetworkProgram(lambda ops, step: {"embedded": self.decoder.embed(ops, step.token_ids)}),
            FORWARD_EMBEDDED: NetworkProgram(replace(code, embedded_width=self.embedded_width), self.embedded_width),
        }


def stored_width(network: Network) -> int:
    """Columns of the hidden states that a network stores; 0: none."""
    return network.stored_width if isinstance(network, DecoderNetwork) else 0
