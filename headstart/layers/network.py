"""Whoever has layers: the trunk, a head, a block drafter, a whole draft model. All are opened and run the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from headstart.kernels.ops import AttentionSpec, Handle, KVSpec, Pool, Program
from headstart.kernels.states import StateSpec
from headstart.layers.decoder import Decoder, Tap


@dataclass(frozen=True)
class Pools:
    """Storage of one network: `kv` by its kv_specs, `states` by its state_specs; `hidden`: the trunk's hidden states,
    which the trunk writes and heads read (None: nobody taps them); `trunk`: the trunk's own `kv`, for a network beside
    it."""

    kv: Seq[Pool]
    states: Seq[Pool] = ()
    hidden: Pool = None
    trunk: Seq[Pool] = ()


class NetworkProgram(NamedTuple):
    """`hidden_width`: columns of the hidden states that its rows read; 0 for none."""

    code: Program
    hidden_width: int = 0


class Network(Protocol):
    """`kv_specs` and `state_specs`: a pool each. `first_position`: the first one that holds KV. `behind`: a row at
    position q reads the stored hidden state of position q - behind; None: its rows read none."""

    @property
    def kv_specs(self) -> Seq[KVSpec]: ...
    @property
    def state_specs(self) -> Seq[StateSpec]: ...
    @property
    def first_position(self) -> int: ...
    @property
    def behind(self) -> int | None: ...

    def programs(self, pools: Pools) -> Mapping[str, NetworkProgram]:
        """What can be run, by name, over these pools."""


@dataclass(eq=False)
class Opened:
    """A network on a runner. `index`: its place in Sequence.filled. Pools and its prepared programs come when memory is
    sized."""

    network: Network
    index: int
    pools: Pools = Pools(())
    handles: Mapping[str, Handle] = field(default_factory=dict)

    @property
    def stored(self) -> list[KVSpec]:
        """What its pools hold of a position, however far a row looks back."""
        specs = self.network.kv_specs
        return [replace(spec, window=0) if isinstance(spec, AttentionSpec) else spec for spec in specs]

    @property
    def reach_back(self) -> int:
        """Positions up to its own that a row depends on, if each layer builds on the one before; 0: on all of them."""
        windows = [spec.window if isinstance(spec, AttentionSpec) else 0 for spec in self.network.kv_specs]
        return sum(windows) if all(windows) else 0


FORWARD = "forward"
"""The one program of a decoder."""


@dataclass(frozen=True)
class DecoderNetwork:
    """A whole decoder: the trunk, or a draft model. `tap`: the hidden states that it keeps in pools.hidden."""

    decoder: Decoder
    tap: Tap | None = None
    first_position: int = 0
    behind: None = None

    @property
    def kv_specs(self) -> Seq[KVSpec]:
        return self.decoder.kv_specs

    @property
    def state_specs(self) -> Seq[StateSpec]:
        return self.decoder.state_specs

    def programs(self, pools: Pools) -> Mapping[str, NetworkProgram]:
        kept = pools.hidden if self.tap else None
        code = self.decoder.program(pools.kv, kept, self.tap or "post_norm", pools.states)
        return {FORWARD: NetworkProgram(code)}
