"""Backends as plug-ins: what each file of backends/ says of itself, and which one a config means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from headstart import registry
from headstart.config import AUTO, EngineConfig, flag_of
from headstart.errors import UsageError
from headstart.kernels.ops import Backend

ORACLE = "reference"
"""The backend that others are compared with, and whose buffers, torch tensors, heads are trained on."""


@dataclass(frozen=True, kw_only=True)
class BackendKind:
    """The constant BACKEND of a file in backends/. The file imports nothing that may be missing until `open`.

    rank: `auto` takes the lowest that can run. why: for doctor. exact: a text depends on no company, chunks, threads.
    limits: (why it cannot run a config here, a hint), or None. open: the backend, for weights of these files.
    flags: fields of EngineConfig that are None unless a backend which has them is meant. widens: weights become
    --dtype. packages: whose versions its speed depends on. present: is there a machine for it, as far as can be told at
    no cost; `auto` does not think of it else. detail: more for doctor.
    """

    rank: int
    why: str
    exact: bool
    limits: Callable[[EngineConfig], tuple[str, str] | None]
    open: Callable[[EngineConfig, tuple[Path, ...]], Backend]
    flags: frozenset[str] = frozenset()
    widens: bool = False
    packages: tuple[str, ...] = ()
    present: Callable[[], bool] = lambda: True
    detail: Callable[[], str] = lambda: ""


@runtime_checkable
class TakesTurns(Protocol):
    """A backend of which several can be in use at a time without being in each other's way."""

    def take_turns(self, other: Backend) -> None:
        """Compute on the threads of another one from now on, a pass at a time, in order of arrival, where they are as
        many. Before anything is loaded."""


@runtime_checkable
class KeepsWeights(Protocol):
    """A backend that keeps packed weights in a file. `could_map`: another load would map what this one has made, and
    share its pages with other processes."""

    could_map: bool


class Chosen(NamedTuple):
    """A backend's name, what it says of itself, and why it is that one."""

    name: str
    kind: BackendKind
    why: str


def kind_of(name: str) -> BackendKind:
    """Of a backend by name. Raises UsageError for one that does not exist."""
    found: BackendKind = registry.find("backends", name).BACKEND
    return found


def choose(config: EngineConfig) -> Chosen:
    """The backend that a config means. Raises UsageError for what cannot run here, naming the flag."""
    kinds = {name: kind_of(name) for name in registry.available("backends")}
    asked = config.backend != AUTO
    present = {name: kind for name, kind in kinds.items() if kind.present()}
    wanted = [config.backend] if asked else sorted(present, key=lambda name: (kinds[name].rank, name))
    refused: dict[str, tuple[str, str]] = {}
    for name in wanted:
        if (cannot := kinds[name].limits(config)) is None:
            _check_flags(config, kinds[name], present)
            why = "asked for" if asked else next((why for why, _ in refused.values()), kinds[name].why)
            return Chosen(name, kinds[name], why)
        refused[name] = cannot
    told = ", and ".join(f"backend {name} cannot run: {why}" for name, (why, _) in refused.items())
    raise UsageError(told, "; or ".join(hint for _, hint in refused.values()))


def open_backend(config: EngineConfig, files: tuple[Path, ...] = ()) -> Backend:
    """The backend a config means; `files`: the checkpoint whose weights it will take. Raises UsageError."""
    return choose(config).kind.open(config, files)


def _check_flags(config: EngineConfig, chosen: BackendKind, kinds: dict[str, BackendKind]) -> None:
    for other, kind in kinds.items():
        for field in sorted(kind.flags - chosen.flags, reverse=True):
            if (value := getattr(config, field)) is not None:
                cannot = kind.limits(config)
                hint = cannot[0] if cannot else "use --backend auto"
                raise UsageError(f"{flag_of(field)} {value} needs the {other} backend", hint)
