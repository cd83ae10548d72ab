"""Weights that a checkpoint stores as codes: the one table that load, inspect, export and plan read.

A quantization is a file of `quantized/` that defines `QUANTIZATION = Quantization(...)`. Its names say which tensors
belong together, `describe` what they stand for, `decode` what their values are.
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
"""Rows [n] of a weight whose leading dimensions are one -> their values [n, columns]."""

FLOATS = ("F64", "F32", "F16", "BF16")
ACTIVATIONS = ("input_scale", "input_scale_ub", "input_global_scale", "input_zero_point", "output_scale",
               "output_zero_point", "activation_scale")  # fmt: skip
"""Last words of static scales of activations: of no use once weights are plain."""
CACHE_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale"})
"""Scales of keys and values: they belong to no weight."""
ORDINARY = frozenset({"scale", "scales", "biases"})  # words that models use for tensors of their own, too
SLAB_VALUES = 1 << 20
AGAIN = "is a shard missing? download the model again"


class Stored(NamedTuple):
    """A weight as a checkpoint has it. `name` is that of the weight (packed ones end in `.weight` too); `beside`: what
    belongs to `main`, by the last word of the name, or by what follows the whole name."""

    name: str
    main: Tensor
    beside: Mapping[str, Tensor]
    settings: Settings

    @property
    def word(self) -> str:
        """Last word of the main tensor's name: weight, qweight, ..."""
        return self.main.name.rpartition(".")[2]

    @property
    def packed(self) -> bool:
        """Does another word stand in the place of `weight`?"""
        return self.name != self.main.name

    @property
    def scale(self) -> Tensor | None:
        """The scales, under any of the names that most quantizations give them."""
        words = ("weight_scale_inv", "weight_scale", "scale", "_scale_inv", "_weight_scale", "_scale")
        return next((self.beside[word] for word in words if word in self.beside), None)


class Kept(NamedTuple):
    """A weight in a type that holds its values in about its own size: a ggml block type, or one of formats.grouped."""

    dtype: str
    rows: Callable[[NDArray[np.int64]], NDArray[np.uint8]]
    """Rows [n] (leading dimensions are one) -> their bytes [n, bytes of a row]."""


class Described(NamedTuple):
    """What a stored weight stands for. `shape` None: the packing hides it."""

    shape: Shape | None
    kind: str


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one weight by part of a model, scales included. `compute` is the precision that products run in."""

    attention: float
    mlp: float
    experts: float
    lm_head: float
    compute: str = "bf16"
    head: float | None = None  # the blocks of a drafting head; None: as the trunk's


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """One way to store weights.

    `detect`: does a quantization_config ask for it? `excludes`: quant_method -> the key of such a config that names
    modules left alone. `packed`: last words of names that stand in the place of `weight`; `beside`: of tensors beside
    it; `after`: what follows the whole name of a weight; `needs`: of each of these, one word must be beside it.
    `types`: of tensors that are its own whatever stands beside them.
    `describe`: None for what another quantization has stored (types and shapes decide, not values). `decode` gives None
    where the values cannot be read here; `integers`: where they are such, in place of `decode`; `keep`: as a type that
    kernels take as it is, in place of both (None: this one is widened); `check` raises ModelError where scales do not
    fit, from headers. `bits` of a weight, roughly. `plans`: what `headstart plan` calls it; the first is the config's.
    """

    describe: Callable[[Stored], Described | None]
    detect: Callable[[Settings], bool] = lambda settings: False
    excludes: Mapping[str, str] = field(default_factory=dict)
    packed: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    needs: tuple[tuple[str, ...], ...] = ()
    types: tuple[str, ...] = ()
    decode: Callable[[Stored], Decode | None] = lambda stored: None
    integers: Callable[[Stored], Integers | None] | None = None
    keep: Callable[[Stored], Kept | None] = lambda stored: None
    check: Callable[[Stored], object] = lambda stored: None
    bits: int = 8
    plans: Mapping[str, WeightBytes] = field(default_factory=dict)


def quantizations() -> dict[str, Quantization]:
    """All that are known, by name."""
    return {name: registry.find("quantizations", name).QUANTIZATION for name in registry.available("quantizations")}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization settings of a config.json; empty where there are none."""
    for place in ("quantization_config", "text_config.quantization_config", "quantization", "compression_config"):
        if isinstance(settings := lookup(config, place), dict):
            return settings
    return {}


def bits_of(settings: Settings) -> int:
    """Bits of integer-packed weights, as the config says; 4 where it does not."""
    groups = settings.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, dict) else {}
    bits = settings.get("bits") or settings.get("w_bit") or lookup(first, "weights.num_bits")
    return bits if bits in (1, 2, 3, 4, 5, 6, 8) else 4


def declared(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization that a config.json asks for; None for one that is not known, and without one."""
    settings = settings_of(config)
    return next((each for each in quantizations().values() if settings and each.detect(settings)), None)


def declared_name(config: Mapping[str, Any]) -> str:
    """The name of the quantization that a config.json asks for; empty without one."""
    found = declared(config)
    return next((name for name, each in quantizations().items() if each is found), "").replace("_", "-")


class Weights:
    """The weights of a checkpoint, by name, each with what belongs to it. `loose`: tensors that belong to a weight by
    their name, which is not there."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self.settings = settings_of(config)
        self._known = list(quantizations().values())
        self._packed = {word for each in self._known for word in each.packed}
        self._beside = {word for each in self._known for word in each.beside} | {*ACTIVATIONS}
        self._marks = self._beside - ORDINARY - {*ACTIVATIONS}
        self._after = sorted({end for each in self._known for end in each.after}, key=len, reverse=True)
        self._seen: dict[Any, tuple[Quantization | None, Described]] = {}
        self._problems: dict[Any, str] = {}
        self.stored: dict[str, Stored] = {}
        self.loose: list[str] = []
        self._group(tensors)

    def _group(self, tensors: Mapping[str, Tensor]) -> None:
        main: dict[str, Tensor] = {}
        beside: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            base, _, last = name.rpartition(".")
            if last in ("weight", "bias"):
                main[name] = tensor
            elif last in self._packed:
                main[f"{base}.weight"] = tensor
            elif owned := self._owner(name, base, last, tensors):
                beside.setdefault(owned[0], {})[owned[1]] = tensor
            elif last not in CACHE_SCALES:
                main[name] = tensor
                if last in self._marks or f".{last}" in self._after:
                    self.loose.append(name)
        for name, tensor in main.items():
            self.stored[name] = Stored(name, tensor, beside.get(name, {}), self.settings)

    def _owner(self, name: str, base: str, last: str, tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """The weight that a tensor belongs to, and its word there; None for one that is a weight itself."""
        if last in self._beside:
            there = any(f"{base}.{word}" in tensors for word in ("weight", *self._packed))
            return (f"{base}.weight", last) if there else None
        for ending in self._after:
            if name.endswith(ending):
                owner = name.removesuffix(ending)
                weight = next((each for each in (owner, f"{owner}_blocks") if each in tensors), None)
                return (weight, ending) if weight else None
        return None

    def look(self, stored: Stored) -> tuple[Quantization | None, Described]:
        """The quantization of a weight (None: plain, or not known), and what it stands for."""
        key = _kind_of(stored)
        if key not in self._seen:
            self._seen[key] = self._describe(stored)
        return self._seen[key]

    def problem(self, stored: Stored) -> str:
        """What headers say against a weight: what it lacks, or what does not fit; empty for a whole one."""
        key = _kind_of(stored)
        if key not in self._problems:
            self._problems[key] = self._problem(stored)
        return self._problems[key]

    def _problem(self, stored: Stored) -> str:
        quantization, described = self.look(stored)
        if quantization is None:
            scaled = stored.packed or stored.main.dtype.startswith(("F8_E", "F4", "F6"))
            scales = "scales that fit" if stored.scale else "scales"
            return f"is {stored.main.dtype}, but no {scales} stand beside it" if scaled else ""
        for words in quantization.needs:
            if not stored.beside.keys() & {*words}:
                return f"is {described.kind}, and no {' or '.join(words)} stands beside it"
        try:
            if described.shape is None or len(described.shape) == 2:
                quantization.check(stored)
        except ModelError as error:
            return f"is {described.kind}: {error.message}"
        return ""

    def _describe(self, stored: Stored) -> tuple[Quantization | None, Described]:
        owners = [each for each in self._known if stored.main.dtype in each.types]
        if owners or stored.beside or stored.packed:
            for each in owners or [each for each in self._known if not each.types]:
                if described := each.describe(stored):
                    return each, described
        return None, Described(stored.main.shape, stored.main.dtype)

    def decode(self, stored: Stored) -> Decode | None:
        """How the values of a weight are read; None for a plain one. ModelError for one that cannot be read."""
        main, marks = stored.main, stored.beside.keys() - ORDINARY - {*ACTIVATIONS}
        quantization, described = self.look(stored)
        if quantization and (decode := quantization.decode(stored)):
            return decode
        if kept := self.kept(stored):
            return _values_of(kept, stored.name, self.shape(stored))
        if make := self.integers(stored):
            return make().values
        if quantization is None and stored.scale is not None and (marks or main.dtype not in FLOATS):
            beside = f"{main.name} is {main.dtype}, but scales {stored.scale.name} stand beside it"
            raise ModelError(beside, "no quantization that is known here stores weights so")
        if quantization or marks or stored.packed:
            raise self.unreadable(main.name, described.kind)
        if main.dtype.startswith("F8_E"):
            raise ModelError(f"{main.name} {self.problem(stored)}", AGAIN)
        return None

    def kept(self, stored: Stored) -> Kept | None:
        """The weight in about its own size, if kernels take it so. ModelError for one that is not whole."""
        quantization, described = self.look(stored)
        if quantization is None or described.shape is None:
            return None
        return quantization.keep(stored)

    def integers(self, stored: Stored) -> Callable[[], Integers] | None:
        """What reads the weight as integers and scales, if it is stored so. ModelError for one that is not whole."""
        quantization, described = self.look(stored)
        if quantization is None or quantization.integers is None or described.shape is None:
            return None
        if problem := self.problem(stored):
            raise ModelError(f"{stored.main.name} {problem}", AGAIN)
        found = partial(quantization.integers, stored)
        return found if found() is not None else None  # type: ignore[return-value]

    def unreadable(self, name: str, kind: str = "") -> ModelError:
        method = self.settings.get("quant_method") or kind or "something unknown"
        hint = "take the unquantized model, FP8 with weight_scale_inv, or a GGUF file"
        return ModelError(f"{name} belongs to a packing: weights quantized as {method} cannot be read", hint)

    def shape(self, stored: Stored) -> Shape:
        shape = self.look(stored)[1].shape
        assert shape is not None, stored.name  # of weights that can be read
        return shape


class WeightHeader(NamedTuple):
    """What headers say of one weight. `shape` is None where packing hides it; `nbytes` counts its scales too.
    `problem`: what headers say against it, such as scales that are not there."""

    shape: Shape | None
    kind: str
    parameters: int
    nbytes: int
    quantized: bool
    problem: str = ""


_TABLES = ("BOOL", "I64", "I32", "I16")  # types of masks and token ids: no parameters


def weight_headers(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, WeightHeader]:
    """Weights by name, packed ones with the shape that they stand for; their names end in `.weight` too."""
    weights = Weights(tensors, config)
    described = {}
    for name, stored in weights.stored.items():
        main, (_, (shape, kind)) = stored.main, weights.look(stored)
        table = main.dtype in _TABLES and not stored.beside
        count = 2 * main.nbytes if shape is None else 0 if table else math.prod(shape)
        nbytes = main.nbytes + sum([each.nbytes for each in stored.beside.values()])
        quantized = kind not in FLOATS + _TABLES
        described[name] = WeightHeader(shape, kind, count, nbytes, quantized, weights.problem(stored))
    return described


def _kind_of(stored: Stored) -> tuple[Any, ...]:
    """Weights that are stored alike; a file has few kinds, but one whose values tell its shape is one of its own."""
    beside = tuple((word, each.dtype, each.shape) for word, each in stored.beside.items())
    own = stored.name if stored.main.shape[-1:] == (1,) else ""
    return stored.main.dtype, stored.main.shape, stored.packed and stored.word, beside, own


def readable(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors with every quantized weight and what belongs to it made one. ModelError for a weight, or a
    quantization_config, of a kind that nobody knows or that cannot be read."""
    weights = Weights(tensors, config)
    method = weights.settings.get("quant_method")
    if method and declared(config) is None:
        known = ", ".join(name for name, each in quantizations().items() if not each.types)
        hint = f"known are {known}; take the unquantized model, or a GGUF file"
        raise ModelError(f"quantization_config names {method!r}, which is unknown", hint)
    if weights.loose:
        raise weights.unreadable(weights.loose[0])
    tensors_read: dict[str, Any] = {}
    for name, stored in weights.stored.items():
        if kept := weights.kept(stored):
            tensors_read[name] = Made(stored, kept, weights.shape(stored))
        elif make := weights.integers(stored):
            tensors_read[name] = Regrouped.of(make, stored.main)
        elif decode := weights.decode(stored):
            tensors_read[name] = Made(stored, _widened(decode), weights.shape(stored))
        else:
            tensors_read |= {each.name: each for each in (stored.main, *stored.beside.values())}
    check_types(each for each in tensors_read.values() if isinstance(each, Tensor))
    return tensors_read


def _widened(decode: Decode) -> Kept:
    return Kept("BF16", lambda rows: rounded(decode(rows)).view(np.uint8))


def _values_of(kept: Kept, name: str, shape: Shape) -> Decode:
    def values(rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return make_tensor(name, (len(rows), shape[-1]), kept.dtype, kept.rows(rows).reshape(-1)).float32()

    return values


@dataclass(frozen=True, eq=False)
class Made(Deferred):
    """A RawTensor [..., rows, columns] whose bytes are made when they are wanted. `first`: the weight's row (leading
    dimensions are one) that its rows begin with."""

    stored: Stored
    kept: Kept
    shape: Shape
    first: int = 0
    part_of: str = ""

    @property
    def name(self) -> str:
        return self.part_of or self.stored.name

    @property
    def dtype(self) -> str:
        return self.kept.dtype

    def fingerprint(self) -> int:
        return self.stored.main.fingerprint() + self.first

    def read(self) -> Tensor:
        """The plain tensor, in memory."""
        return self._made(np.arange(math.prod(self.shape[:-1])), self.shape)

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        if len(self.shape) > 2:
            return self.read().take_rows(rows)
        return self._made(np.asarray(rows), (len(rows), self.shape[-1]))

    def part(self, index: int) -> "Made":
        first = self.first + index * math.prod(self.shape[1:-1])
        return Made(self.stored, self.kept, self.shape[1:], first, f"{self.name}[{index}]")

    def _made(self, rows: NDArray[np.int64], shape: Shape) -> Tensor:
        return make_tensor(self.name, shape, self.dtype, self.kept.rows(rows + self.first).reshape(-1))


def planned(name: str, shape: Shape, decode: Decode) -> Planned:
    """A quantized weight to be written in bfloat16, a slab of rows at a time."""
    return Planned(name, "BF16", shape, lambda: _slabs(shape, decode))


def _slabs(shape: Shape, decode: Decode) -> Iterator[NDArray[np.uint16]]:
    rows, step = math.prod(shape[:-1]), max(1, SLAB_VALUES // shape[-1])
    for begin in range(0, rows, step):
        yield rounded(decode(np.arange(begin, min(begin + step, rows))))


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16, ties to even; every NaN becomes the positive quiet one, as in torch."""
    return np.where(np.isnan(values), np.uint16(0x7FC0), bfloat16(values)[0])
