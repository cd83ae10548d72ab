"""Backend plug-ins: what each file of backends/ declares, and which backend a config selects."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from headstart import registry
from headstart.config import AUTO, EngineConfig
from headstart.errors import ParameterError, UsageError
from headstart.kernels.ops import Backend
from headstart.wording import joined, option

ORACLE = "reference"
"""The backend that others are compared with. Its buffers are torch tensors, on which heads are trained."""


@dataclass(frozen=True, kw_only=True)
class BackendKind:
    """The constant BACKEND of a file in backends/. The file imports optional packages only inside `open`."""

    rank: int  # `--backend auto` takes the lowest rank that can run
    why: str  # one line for doctor: why auto chose it
    exact: bool  # texts do not depend on batch neighbours, chunks or threads
    limits: Callable[[EngineConfig], tuple[str, str] | None]  # as `refusal`, without the check of --dtype
    open: Callable[[EngineConfig, tuple[Path, ...]], Backend]  # the backend for the weights in these files
    flags: frozenset[str] = frozenset()  # EngineConfig fields that only backends which list them accept
    uses_dtype: bool = False  # computes in --dtype
    packages: tuple[str, ...] = ()  # packages whose versions the speed depends on
    is_present: Callable[[], bool] = lambda: True  # a cheap check for the hardware; if False, `auto` skips it
    detail: Callable[[], str] = lambda: ""  # more for doctor

    def refusal(self, config: EngineConfig) -> tuple[str, str] | None:
        """(why this config cannot run here, hint), or None."""
        if (refusal := self.limits(config)) is None and config.dtype != "float32" and not self.uses_dtype:
            return option("dtype", config.dtype) + " is the reference backend's", "leave " + option("dtype") + " out"
        return refusal


@runtime_checkable
class SharesThreads(Protocol):
    """A backend of which several instances can compute on the same threads."""

    def share_threads(self, other: Backend) -> None:
        """Compute on the threads of `other` if both have as many, one pass at a time. Called before loading."""


@runtime_checkable
class CachesWeights(Protocol):
    """A backend that keeps packed weights in a file."""

    wrote_weight_cache: bool  # this load wrote the file; another process would map it and share its pages


class SelectedBackend(NamedTuple):
    """A backend's name and declaration, and why it was selected."""

    name: str
    kind: BackendKind
    why: str


def backend_kind(name: str) -> BackendKind:
    """The declaration of a backend. Raises UsageError for an unknown name."""
    found: BackendKind = registry.find("backends", name).BACKEND
    return found


def select_backend(config: EngineConfig) -> SelectedBackend:
    """The backend for a config. Raises UsageError, naming the flag, if none can run here."""
    kinds = {name: backend_kind(name) for name in registry.available("backends")}
    is_named = config.backend != AUTO
    present = {name: kind for name, kind in kinds.items() if kind.is_present()}
    candidates = [config.backend] if is_named else sorted(present, key=lambda name: (kinds[name].rank, name))
    refused: dict[str, tuple[str, str]] = {}
    for name in candidates:
        if (refusal := kinds[name].refusal(config)) is None:
            _check_flags(config, kinds[name], present)
            why = "asked for" if is_named else next((why for why, _ in refused.values()), kinds[name].why)
            return SelectedBackend(name, kinds[name], why)
        refused[name] = refusal
    reasons = (f"backend {name} cannot run: " + why for name, (why, _) in refused.items())
    raise UsageError(joined(", and ", reasons), joined("; or ", (hint for _, hint in refused.values())))


def open_backend(config: EngineConfig, files: tuple[Path, ...] = ()) -> Backend:
    """Open the backend for a config and the checkpoint in `files`. Raises UsageError."""
    return select_backend(config).kind.open(config, files)


def _check_flags(config: EngineConfig, chosen: BackendKind, kinds: dict[str, BackendKind]) -> None:
    """Raise UsageError for a flag that only another backend accepts."""
    for other, kind in kinds.items():
        for field in sorted(kind.flags - chosen.flags, reverse=True):
            if (value := getattr(config, field)) is not None and value is not False:
                refusal = kind.refusal(config)
                hint = refusal[0] if refusal else "use " + option("backend", "auto")
                what = f"{'' if value is True else f'{value} '}needs the {other} backend"
                raise ParameterError(option(field), what, hint)
