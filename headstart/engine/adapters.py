"""`Adapters`: the LoRA adapters of an engine, by name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from headstart.core import Adapter
from headstart.engine.load import Model
from headstart.engine.runner import Runner
from headstart.errors import ModelError, UsageError
from headstart.formats.adapter import AdapterFile, LowRank, names_of, read_adapter
from headstart.kernels.ops import AdapterBackend, LoraTable, Program
from headstart.layers.lora import multiplied_weights
from headstart.layers.network import FORWARD
from headstart.models.lora import REMEDY, fit_adapter
from headstart.wording import option


@dataclass(frozen=True)
class FittedAdapter:
    """An adapter of one model."""

    file: AdapterFile
    factors: list[LowRank | None]  # see fit_adapter


def fit_to_program(file: AdapterFile, model: Model, code: Program) -> FittedAdapter:
    """Fits an adapter to a program of the trunk. Raises ModelError if it does not fit, or cannot be computed."""
    if not isinstance(model.backend, AdapterBackend):
        raise ModelError(
            f"backend {model.backend.name} does not run LoRA adapters", "use " + option("backend", "native")
        )
    factors = fit_adapter(file, model.checkpoint, model.family, model.config)
    multiplied = multiplied_weights(code)
    pairs = zip(model.weights.converted, factors, strict=False)
    if left := {each.name for weight, each in pairs if each and id(weight) not in multiplied}:
        raise ModelError(f"{file.path}: LoRA of {names_of(left)} is not supported", REMEDY)
    return FittedAdapter(file, factors)


def lora_tables(model: Model, by_slot: Sequence[FittedAdapter | None]) -> dict[int, LoraTable]:
    """The factors of the adapters in all slots (None: an empty slot), by the id() of the weight that they change."""
    backend = model.backend
    assert isinstance(backend, AdapterBackend)
    tables: dict[int, LoraTable] = {}
    columns = zip_longest(*(fitted.factors if fitted else [] for fitted in by_slot))
    for weight, factors in zip(model.weights.converted, columns, strict=False):
        shape = next((each.shape for each in factors if each), None)
        if shape is not None:
            num_out, num_in = shape
            pairs = [each.factors if each else None for each in factors]
            tables[id(weight)] = backend.lora_table(num_in, num_out, pairs)
    return tables


class Adapters:
    """Adapters that requests may name. `fit` and `find` may be called in any thread, `add` and `remove` between two
    steps of the engine."""

    def __init__(self, model: Model, runner: Runner) -> None:
        self._model, self._runner = model, runner
        self._fitted: dict[int, FittedAdapter] = {}  # by slot, also unloaded ones that requests still use
        self.loaded: dict[str, Adapter] = {}  # by name; replaced as a whole, so that any thread may read it

    def find(self, name: str) -> Adapter:
        """A loaded adapter. Raises UsageError for another name."""
        if name not in self.loaded:
            hint = f"loaded: {', '.join(self.loaded)}" if self.loaded else "load one: " + option("lora", "NAME=PATH")
            raise UsageError(f"no LoRA adapter is named {name!r}", hint)
        return self.loaded[name]

    def fit(self, path: Path) -> FittedAdapter:
        """Reads an adapter and fits it to the trunk. Raises ModelError as `read_adapter` and `fit_to_program` do."""
        trunk = self._runner.trunk
        return fit_to_program(read_adapter(path), self._model, trunk.network.programs(trunk.pools)[FORWARD].code)

    def add(self, name: str, fitted: FittedAdapter, in_use: Iterable[int], *, replace: bool = False) -> Adapter:
        """Makes an adapter available. in_use: slots of running requests. replace: it may take the name of a loaded
        adapter. Raises UsageError for an empty name, and for a name in use."""
        adapter = self._hold(name, fitted, in_use, replace=replace)
        self._install()
        self.loaded = {**self.loaded, name: adapter}
        return adapter

    def add_all(self, paths: Iterable[tuple[str, str]]) -> None:
        """Makes the adapters of (name, path) pairs available. Raises as `fit` and `add` do."""
        for name, path in paths:
            self.loaded = {**self.loaded, name: self._hold(name, self.fit(Path(path)), ())}
        if self._fitted:
            self._install()

    def _hold(self, name: str, fitted: FittedAdapter, in_use: Iterable[int], *, replace: bool = False) -> Adapter:
        """Puts an adapter into a free slot; `_install` gives its factors to the trunk's programs. Raises as `add`."""
        if not isinstance(name, str) or not name.strip():
            raise UsageError(f"the adapter's name is {name!r}", "give a text")
        if name in self.loaded and not replace:
            raise UsageError(f"an adapter named {name!r} is loaded already", "unload it first, or choose another name")
        self._drop_unused(name, in_use)
        slot = next(slot for slot in range(len(self._fitted) + 1) if slot not in self._fitted)
        self._fitted[slot] = fitted
        return Adapter(name, slot, fitted.file.digest, str(fitted.file.path))

    def remove(self, name: str, in_use: Iterable[int]) -> None:
        """Makes an adapter unavailable to new requests. Running requests still use it. Raises UsageError for an unknown
        name."""
        self.find(name)
        self.loaded = {other: adapter for other, adapter in self.loaded.items() if other != name}
        self._drop_unused(name, in_use)
        self._install()

    def _drop_unused(self, name: str, in_use: Iterable[int]) -> None:
        """Drops the adapters that neither running requests nor loaded names but `name` use."""
        kept = {adapter.slot for other, adapter in self.loaded.items() if other != name} | set(in_use)
        self._fitted = {slot: fitted for slot, fitted in self._fitted.items() if slot in kept}

    def _install(self) -> None:
        """Gives the factors of all held adapters to the trunk's programs."""
        slots = range(max(self._fitted, default=-1) + 1)
        self._runner.use_adapters(lora_tables(self._model, [self._fitted.get(slot) for slot in slots]))
