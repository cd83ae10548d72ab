"""Quantized weights of checkpoints, for load, inspect, export and plan.

Each file of `quantized/` defines one quantization as `QUANTIZATION = Quantization(...)`: the names of the tensors that
make up a weight, the weight's shape (`describe`), and its values (`keep`, `integers` or `decode`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart import registry
from headstart.errors import ModelError
from headstart.formats.base import Tensor, check_types, make_tensor
from headstart.formats.integers import Integers, Regrouped
from headstart.formats.rows import Deferred
from headstart.formats.safetensors import Planned, bfloat16
from headstart.formats.sizes import lookup

Shape = tuple[int, ...]
Settings = Mapping[str, Any]  # quantization_config of a config.json
Decode = Callable[[NDArray[np.int64]], NDArray[np.float32]]
"""Row indices [n] of a weight, whose leading dimensions are flattened into rows -> values [n, columns]."""

FLOATS = ("F64", "F32", "F16", "BF16")
ACTIVATIONS = ("input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "output_scale",
               "output_zero_point", "activation_scale")  # fmt: skip
"""Last words of the names of activation scales, which are ignored."""
CACHE_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale"})
"""Last words of the names of attention and KV cache scales, which belong to no weight and are ignored."""
ORDINARY = frozenset({"scale", "scales", "biases"})  # last words that models also use for unquantized tensors
SLAB_VALUES = 1 << 20  # values that `planned` writes at a time
AGAIN = "is a shard missing? download the model again"


class Stored(NamedTuple):
    """A weight with the tensors that store it."""

    name: str  # ends in `.weight` also for packed weights
    main: Tensor  # its codes
    auxiliary: Mapping[str, Tensor]
    """Scales, zero points, ... by the last word of their names, or by their ending after the weight's whole name."""
    settings: Settings

    @property
    def word(self) -> str:
        """Last word of the main tensor's name: weight, qweight, ..."""
        return self.main.name.rpartition(".")[2]

    @property
    def packed(self) -> bool:
        """Whether the main tensor's name has another last word than the weight's, such as qweight."""
        return self.name != self.main.name

    @property
    def scale(self) -> Tensor | None:
        """The tensor of scales, under one of its usual names; None without one."""
        words = ("weight_scale_inv", "weight_scale", "scale", "_scale_inv", "_weight_scale", "_scale")
        return next((self.auxiliary[word] for word in words if word in self.auxiliary), None)


class Repacked(NamedTuple):
    """A weight repacked in a dtype of about the same size: a ggml block type, or one of formats.grouped."""

    dtype: str
    rows: Callable[[NDArray[np.int64]], NDArray[np.uint8]]
    """Row indices [n], as in Decode -> the rows' bytes [n, bytes of a row]."""


class Described(NamedTuple):
    """Shape and kind of a stored weight, by its tensors' names, types and shapes."""

    shape: Shape | None  # None: headers do not tell it
    kind: str  # such as FP8 or int4 (gptq), for reports and errors


@dataclass(frozen=True)
class WeightBytes:
    """Bytes per weight in each part of a model, scales included. `compute`: precision of the matrix products."""

    attention: float
    mlp: float
    experts: float
    lm_head: float
    compute: str = "bf16"
    head: float | None = None  # blocks of a drafting head; None: the same as the trunk's


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """One way to store weights.

    Recognition: `detect`: whether a quantization_config asks for it. `describe`: shape and kind of a weight; None if
    another quantization has stored it (names, types and shapes decide, not values). `types`: dtypes that belong to this
    quantization alone. `excludes`: quant_method -> config key of the modules that are not quantized.
    Names: `packed`: last words that replace `weight`. `auxiliary`: last words of further tensors of a weight. `after`:
    endings of further tensors after the weight's whole name. `needs`: of each tuple, one word must be present.
    Values, the first that is not None: `keep` (a dtype that kernels support), `integers`, `decode` (floats, then BF16).
    `check` raises ModelError if the scales' headers do not fit the weight.
    For plan: `bits`: bits of a weight, roughly. `plans`: name in `headstart plan` -> sizes; the first is the config's.
    """

    describe: Callable[[Stored], Described | None]
    detect: Callable[[Settings], bool] = lambda settings: False
    excludes: Mapping[str, str] = field(default_factory=dict)
    packed: tuple[str, ...] = ()
    auxiliary: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    needs: tuple[tuple[str, ...], ...] = ()
    types: tuple[str, ...] = ()
    decode: Callable[[Stored], Decode | None] = lambda stored: None
    integers: Callable[[Stored], Integers | None] | None = None
    keep: Callable[[Stored], Repacked | None] = lambda stored: None
    check: Callable[[Stored], object] = lambda stored: None
    bits: int = 8
    plans: Mapping[str, WeightBytes] = field(default_factory=dict)


def quantizations() -> dict[str, Quantization]:
    """Name -> quantization, for all files of `quantized/`."""
    return {name: registry.find("quantizations", name).QUANTIZATION for name in registry.available("quantizations")}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization settings of a config.json; empty if it has none."""
    for place in ("quantization_config", "text_config.quantization_config", "quantization", "compression_config"):
        if isinstance(settings := lookup(config, place), dict):
            return settings
    return {}


def bits_of(settings: Settings) -> int:
    """Bits of integer codes according to the settings; 4 if they give none."""
    groups = settings.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, dict) else {}
    bits = settings.get("bits") or settings.get("w_bit") or lookup(first, "weights.num_bits")
    return bits if bits in (1, 2, 3, 4, 5, 6, 8) else 4


def declared_name(config: Mapping[str, Any]) -> str:
    """The name of the quantization that a config.json asks for; empty if it asks for none or an unknown one."""
    settings = settings_of(config)
    return next((name for name, each in quantizations().items() if settings and each.detect(settings)), "")


def declared(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization that a config.json asks for; None if it asks for none or an unknown one."""
    return quantizations().get(declared_name(config))


class StoredWeights:
    """Groups the tensors of a checkpoint by weight. `stored`: weight name -> Stored. `loose`: names of tensors that by
    their name belong to a weight that is missing."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self.settings = settings_of(config)
        self._known = list(quantizations().values())
        self._packed = {word for each in self._known for word in each.packed}
        self._auxiliary = {word for each in self._known for word in each.auxiliary} | {*ACTIVATIONS}
        self._marks = self._auxiliary - ORDINARY - {*ACTIVATIONS}
        self._after = sorted({end for each in self._known for end in each.after}, key=len, reverse=True)
        self._seen: dict[Any, tuple[Quantization | None, Described]] = {}
        self._problems: dict[Any, str] = {}
        self.stored: dict[str, Stored] = {}
        self.loose: list[str] = []
        self._group(tensors)

    def _group(self, tensors: Mapping[str, Tensor]) -> None:
        main: dict[str, Tensor] = {}
        auxiliary: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            base, _, last = name.rpartition(".")
            if last in ("weight", "bias"):
                main[name] = tensor
            elif last in self._packed:
                main[f"{base}.weight"] = tensor
            elif owned := self._owner(name, base, last, tensors):
                auxiliary.setdefault(owned[0], {})[owned[1]] = tensor
            elif last not in CACHE_SCALES:
                main[name] = tensor
                if last in self._marks or f".{last}" in self._after:
                    self.loose.append(name)
        for name, tensor in main.items():
            self.stored[name] = Stored(name, tensor, auxiliary.get(name, {}), self.settings)

    def _owner(self, name: str, base: str, last: str, tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """(weight name, key in Stored.auxiliary) of a tensor that belongs to a weight; None for other tensors."""
        if last in self._auxiliary:
            there = any(f"{base}.{word}" in tensors for word in ("weight", *self._packed))
            return (f"{base}.weight", last) if there else None
        for ending in self._after:
            if name.endswith(ending):
                owner = name.removesuffix(ending)
                weight = next((each for each in (owner, f"{owner}_blocks") if each in tensors), None)
                return (weight, ending) if weight else None
        return None

    def look(self, stored: Stored) -> tuple[Quantization | None, Described]:
        """The quantization of a weight (None: unquantized or unknown), and its shape and kind."""
        key = _kind_of(stored)
        if key not in self._seen:
            self._seen[key] = self._describe(stored)
        return self._seen[key]

    def problem(self, stored: Stored) -> str:
        """A fault of a weight that its headers show, such as missing scales; empty without a fault."""
        key = _kind_of(stored)
        if key not in self._problems:
            self._problems[key] = self._problem(stored)
        return self._problems[key]

    def _problem(self, stored: Stored) -> str:
        quantization, described = self.look(stored)
        if quantization is None:
            scaled = stored.packed or stored.main.dtype.startswith(("F8_E", "F4", "F6"))
            scales = "scales that fit" if stored.scale else "scales"
            return f"is {stored.main.dtype}, but has no {scales}" if scaled else ""
        for words in quantization.needs:
            if not stored.auxiliary.keys() & {*words}:
                return f"is {described.kind}, but has no {' or '.join(words)}"
        try:
            if described.shape is None or len(described.shape) == 2:
                quantization.check(stored)
        except ModelError as error:
            return f"is {described.kind}: {error.message}"
        return ""

    def _describe(self, stored: Stored) -> tuple[Quantization | None, Described]:
        owners = [each for each in self._known if stored.main.dtype in each.types]
        if owners or stored.auxiliary or stored.packed:
            for each in owners or [each for each in self._known if not each.types]:
                if described := each.describe(stored):
                    return each, described
        return None, Described(stored.main.shape, stored.main.dtype)

    def decode(self, stored: Stored) -> Decode | None:
        """The function that reads a weight's values; None if it is unquantized. ModelError if it cannot be read."""
        main, marks = stored.main, stored.auxiliary.keys() - ORDINARY - {*ACTIVATIONS}
        quantization, described = self.look(stored)
        if quantization and (decode := quantization.decode(stored)):
            return decode
        if repacked := self.repacked(stored):
            return _values_of(repacked, stored.name, self.shape(stored))
        if regrouped := self.regrouped(stored):
            return regrouped.make().values
        if quantization is None and stored.scale is not None and (marks or main.dtype not in FLOATS):
            what = f"{main.name} is {main.dtype}, but has scales {stored.scale.name}"
            raise ModelError(what, "no known quantization stores weights in this way")
        if quantization or marks or stored.packed:
            raise self.unreadable(main.name, described.kind)
        if main.dtype.startswith("F8_E"):
            raise ModelError(f"{main.name} {self.problem(stored)}", AGAIN)
        return None

    def repacked(self, stored: Stored) -> Repacked | None:
        """The weight repacked in a dtype that kernels support, or None. Raises ModelError for an incomplete weight."""
        quantization, described = self.look(stored)
        if quantization is None or described.shape is None:
            return None
        return quantization.keep(stored)

    def regrouped(self, stored: Stored) -> Regrouped | None:
        """The weight repacked from its integers and scales, or None. Raises ModelError for an incomplete weight."""
        quantization, described = self.look(stored)
        if quantization is None or quantization.integers is None or described.shape is None:
            return None
        if problem := self.problem(stored):
            raise ModelError(f"{stored.main.name} {problem}", AGAIN)
        make = partial(quantization.integers, stored)
        if (found := make()) is None:
            return None
        return Regrouped(found.name, found.shape, found.dtype, make, stored.main)  # type: ignore[arg-type]

    def unreadable(self, name: str, kind: str = "") -> ModelError:
        method = self.settings.get("quant_method") or kind or "something unknown"
        hint = "take the unquantized model, FP8 with weight_scale_inv, or a GGUF file"
        return ModelError(f"{name} belongs to a packing: weights quantized as {method} cannot be read", hint)

    def shape(self, stored: Stored) -> Shape:
        shape = self.look(stored)[1].shape
        assert shape is not None, stored.name  # of weights that can be read
        return shape


class WeightHeader(NamedTuple):
    """Facts from the headers of one weight. `shape`: None if the headers do not tell it. `nbytes`: with scales.
    `problem`: see `StoredWeights.problem`."""

    shape: Shape | None
    kind: str
    parameters: int
    nbytes: int
    quantized: bool
    problem: str = ""


_TABLES = ("BOOL", "I64", "I32", "I16")  # dtypes of masks and token ids, which do not count as parameters


def weight_headers(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, WeightHeader]:
    """Weight name -> facts from the headers. Names and shapes are those of the unpacked weights."""
    weights = StoredWeights(tensors, config)
    described = {}
    for name, stored in weights.stored.items():
        main, (_, (shape, kind)) = stored.main, weights.look(stored)
        table = main.dtype in _TABLES and not stored.auxiliary
        count = 2 * main.nbytes if shape is None else 0 if table else math.prod(shape)
        nbytes = main.nbytes + sum([each.nbytes for each in stored.auxiliary.values()])
        quantized = kind not in FLOATS + _TABLES
        described[name] = WeightHeader(shape, kind, count, nbytes, quantized, weights.problem(stored))
    return described


def _kind_of(stored: Stored) -> tuple[Any, ...]:
    """Cache key, equal for weights that are stored alike; own for a column of bytes, whose shape depends on values."""
    auxiliary = tuple((word, each.dtype, each.shape) for word, each in stored.auxiliary.items())
    own = stored.name if stored.main.shape[-1:] == (1,) else ""
    return stored.main.dtype, stored.main.shape, stored.packed and stored.word, auxiliary, own


def readable(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Any]:
    """RawTensors of a checkpoint by name: each quantized weight and its scales become one. Raises ModelError for a
    weight or quantization_config that is unknown or cannot be read."""
    weights = _known_weights(tensors, config)
    tensors_read: dict[str, Any] = {}
    for name, stored in weights.stored.items():
        if repacked := weights.repacked(stored):
            tensors_read[name] = RepackedTensor(stored, repacked, weights.shape(stored))
        elif regrouped := weights.regrouped(stored):
            tensors_read[name] = regrouped
        elif decode := weights.decode(stored):
            tensors_read[name] = RepackedTensor(stored, _widened(decode), weights.shape(stored))
        else:
            tensors_read |= {each.name: each for each in (stored.main, *stored.auxiliary.values())}
    check_types(each for each in tensors_read.values() if isinstance(each, Tensor))
    return tensors_read


def readable_shapes(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Shape] | None:
    """Names and shapes of `readable`, from headers alone; None if the headers of a weight do not tell its shape. Raises
    ModelError as `readable` does, except for wrong values."""
    weights, shapes = _known_weights(tensors, config), {}
    for name, stored in weights.stored.items():
        quantization, (shape, _) = weights.look(stored)
        if problem := weights.problem(stored):
            raise ModelError(f"{stored.main.name} {problem}", AGAIN)
        if shape is None or "weight_shape" in stored.auxiliary:  # whose values tell it
            return None
        shapes[name] = shape
        if quantization is None:
            shapes |= {each.name: each.shape for each in stored.auxiliary.values()}
    check_types(tensors.values())
    return shapes


def _known_weights(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> StoredWeights:
    """The weights of a checkpoint. Raises ModelError for an unknown quantization_config, or a tensor whose weight is
    missing."""
    weights = StoredWeights(tensors, config)
    method = weights.settings.get("quant_method")
    if method and declared(config) is None:
        known = ", ".join(name for name, each in quantizations().items() if not each.types)
        hint = f"known are {known}; take the unquantized model, or a GGUF file"
        raise ModelError(f"quantization_config names {method!r}, which is unknown", hint)
    if weights.loose:
        raise weights.unreadable(weights.loose[0])
    return weights


def _widened(decode: Decode) -> Repacked:
    return Repacked("BF16", lambda rows: rounded(decode(rows)).view(np.uint8))


def _values_of(repacked: Repacked, name: str, shape: Shape) -> Decode:
    def values(rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return make_tensor(name, (len(rows), shape[-1]), repacked.dtype, repacked.rows(rows).reshape(-1)).float32()

    return values


@dataclass(frozen=True, eq=False)
class RepackedTensor(Deferred):
    """A RawTensor [..., rows, columns] of a quantized weight, repacked at each access. `first`: the row of the weight
    (leading dimensions flattened into rows) with which this tensor begins."""

    stored: Stored
    repacked: Repacked
    shape: Shape
    first: int = 0
    part_of: str = ""

    @property
    def name(self) -> str:
        return self.part_of or self.stored.name

    @property
    def dtype(self) -> str:
        return self.repacked.dtype

    def fingerprint(self) -> int:
        return self.stored.main.fingerprint() + self.first

    def read(self) -> Tensor:
        return self._rows(np.arange(math.prod(self.shape[:-1])), self.shape)

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        if len(self.shape) > 2:
            return self.read().take_rows(rows)
        return self._rows(np.asarray(rows), (len(rows), self.shape[-1]))

    def part(self, index: int) -> "RepackedTensor":
        first = self.first + index * math.prod(self.shape[1:-1])
        return RepackedTensor(self.stored, self.repacked, self.shape[1:], first, f"{self.name}[{index}]")

    def _rows(self, rows: NDArray[np.int64], shape: Shape) -> Tensor:
        return make_tensor(self.name, shape, self.dtype, self.repacked.rows(rows + self.first).reshape(-1))


def planned(name: str, shape: Shape, decode: Decode) -> Planned:
    """A plan that writes a quantized weight as BF16, a slab of rows at a time."""
    return Planned(name, "BF16", shape, lambda: _slabs(shape, decode))


def _slabs(shape: Shape, decode: Decode) -> Iterator[NDArray[np.uint16]]:
    rows, step = math.prod(shape[:-1]), max(1, SLAB_VALUES // shape[-1])
    for begin in range(0, rows, step):
        yield rounded(decode(np.arange(begin, min(begin + step, rows))))


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even. Every NaN becomes the positive quiet NaN, as in torch."""
    return np.where(np.isnan(values), np.uint16(0x7FC0), bfloat16(values)[0])
