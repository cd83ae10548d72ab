"""Matrices of every form, plans and backends for tests of native ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("headstart.kernels.native.backend", exc_type=ImportError)

from headstart.core import StepPlan
from headstart.formats.base import make_tensor
from headstart.kernels.native import packing
from headstart.kernels.native.backend import NativeBackend, instruction_paths
from headstart.kernels.ops import AttentionSpec

if TYPE_CHECKING:
    import torch  # imported where it is used: bits are compared on processors without torch, too

Array = NDArray[Any]
PATHS = instruction_paths()
PAIRED = ("amx", "avx512bf16")
"""Paths on which bfloat16 (and FP8, which it holds) meets bfloat16: rows are rounded, queries and weights over a cache
that is not float32."""
BLOCK = 16
ONE_THREAD = packing.ThreadPool(1)


F16, F32_SCALES, BF16_SCALES, E8M0, E4M3, I8 = range(6)
SCALE_TYPES = ("<f2", "<f4", "<u2", "u1", "u1", "i1")
MINS, POINTS = 1, 2
FLOAT8, LEVELS = 5, 6
"""Kinds of csrc/matrix.h that have scales, and multiply rows of floats."""
SIX_BITS, FIVE_BITS = 7, 8
FACTOR_PANELS = 4
"""That share the factors of scales of 8 bits."""


@dataclass(frozen=True)
class Form:
    """Storage of a matrix; see csrc/matrix.h."""

    kind: int
    group: int = 32
    zero: int = 0
    scales: int = F16
    offsets: int = 0
    levels: int = 0

    @property
    def quantized(self) -> bool:
        """Whether rows are quantized to 8 bits."""
        return self.kind in (3, 4, SIX_BITS, FIVE_BITS)

    def rounds_rows(self, path: str) -> bool:
        """Whether rows are rounded to bfloat16."""
        return self.kind in (2, FLOAT8) and path in PAIRED

    @property
    def has_min(self) -> bool:
        return self.offsets == MINS

    @property
    def per_panel(self) -> int:
        return 64 // self.group * 16

    @property
    def factor_bytes(self) -> int:
        return 64 * (self.scales in (E4M3, I8))

    def panels(self, data: Array, blocks: int, panels: int) -> list[Array]:
        """Views of the panels, each [blocks, bytes]."""
        num_factors = -(-panels // FACTOR_PANELS) if self.scales == I8 else 1
        rows = data.reshape(blocks, -1)
        size = (rows.shape[1] - num_factors * self.factor_bytes) // panels
        before = [1 + (i // FACTOR_PANELS) * (self.scales == I8) for i in range(panels)]  # factor areas
        return [rows[:, at : at + size] for i in range(panels) for at in [i * size + self.factor_bytes * before[i]]]


FORMS = {
    "F32": Form(0), "F16": Form(1), "BF16": Form(2),
    "Q8-32-f16": Form(3, 32, 128),
    "Q4-32-f16": Form(4, 32, 8), "Q4-32-f16-min": Form(4, offsets=MINS), "Q4-32-i8-min": Form(4, 32, 0, I8, MINS),
    "Q4-16-i8": Form(4, 16, 4, I8), "Q4-16-i8-min": Form(4, 16, 0, I8, MINS),
    "Q5-32-f16": Form(FIVE_BITS, 32, 16), "Q5-32-f16-min": Form(FIVE_BITS, offsets=MINS),
    "Q5-32-i8-min": Form(FIVE_BITS, 32, 0, I8, MINS), "Q6-16-i8": Form(SIX_BITS, 16, 32, I8),
    "Q8-64-f32": Form(3, 64, 128, F32_SCALES), "Q8-64-bf16-points": Form(3, 64, 0, BF16_SCALES, POINTS),
    "Q4-64-bf16-points": Form(4, 64, 0, BF16_SCALES, POINTS), "Q4-32-f16-points": Form(4, 32, 0, F16, POINTS),
    "E2M1-32-e8m0": Form(4, 32, 128, E8M0, levels=1), "E2M1-16-e4m3": Form(4, 16, 128, E4M3, levels=1),
    "IQ4-32-f16": Form(4, 32, 128, F16, levels=2), "IQ4-32-i8": Form(4, 32, 128, I8, levels=2),
    "E4M3-64": Form(FLOAT8, 64, scales=F32_SCALES), "E4M3-16": Form(FLOAT8, 16, scales=F32_SCALES),
    "NF4-64": Form(LEVELS, 64, scales=F32_SCALES, levels=3), "FP4-32": Form(LEVELS, 32, scales=F32_SCALES, levels=4),
}  # fmt: skip


def random_matrix(form: Form, rows: int, cols: int, rng: np.random.Generator) -> packing.Matrix:
    """Values of about 1. Grouped forms have random bits, in the padding as well, which must not affect results."""
    out = packing.aligned_empty(packing.matrix_bytes(form.kind, rows, cols, form.group, form.scales, form.offsets))
    if form.kind > 2:
        _fill_grouped(form, rows, cols, rng, out)
    else:
        values = rng.standard_normal(out.size // (4 if form.kind == 0 else 2))
        out[:] = (values.astype("<f4") if form.kind == 0 else _two_bytes(form, values)).view(np.uint8)
    return packing.Matrix(form.kind, rows, cols, form.group, form.zero, form.scales, form.offsets, out, form.levels)


def matrix_of(values: Array) -> packing.Matrix:
    """A float32 matrix with the given values."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    return packing.pack(make_tensor("w", values.shape, "F32", flat), ONE_THREAD)


def _two_bytes(form: Form, values: Array) -> Array:
    return values.astype("<f2") if form.kind == 1 else (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def _fill_grouped(form: Form, rows: int, cols: int, rng: np.random.Generator, out: Array) -> None:
    blocks, num_panels = -(-rows // 16), -(-cols // 64)
    if form.factor_bytes:  # written everywhere: panels overwrite the rest
        size = "<f4" if form.scales == E4M3 else "<f2"
        factors = rng.uniform(0.5, 2, out.size // np.dtype(size).itemsize) / (1 if form.scales == E4M3 else 100)
        out[:] = factors.astype(size).view(np.uint8)
    for panel in form.panels(out, blocks, num_panels):
        codes = rng.integers(0, 256, panel.shape, dtype=np.uint8)
        panel[:] = np.where(codes & 0x7F == 0x7F, codes - 1, codes) if form.kind == FLOAT8 else codes
        head = _scales_of(form, rng, (blocks,))
        panel[:, : head.shape[-1]] = head


def _scales_of(form: Form, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Random bytes of the scales of panels, and of their minima."""
    small = 6 if form.levels == 1 else 127 if form.levels == 2 else 15
    most = {3: 255, 4: small, FLOAT8: 200, LEVELS: 1, SIX_BITS: 63, FIVE_BITS: 31}[form.kind]
    shape = (*shape, form.per_panel)
    if form.scales == I8:
        return rng.integers(-32, 64, (*shape[:-1], shape[-1] * (2 if form.has_min else 1))).astype("i1").view(np.uint8)
    if form.scales in (E8M0, E4M3):
        return rng.integers(*((122, 126) if form.scales == E8M0 else (0, 0x40)), shape).astype(np.uint8)
    heads = [rng.standard_normal(shape) * 2 / most]
    if form.has_min:
        heads.append(rng.standard_normal(shape))
    return np.ascontiguousarray(_stored(form, np.concatenate(heads, axis=-1).astype("<f4"))).view(np.uint8)


def _stored(form: Form, values: Array) -> Array:
    if form.scales == BF16_SCALES:
        return (values.view("<u4") >> 16).astype("<u2")
    return values.astype(SCALE_TYPES[form.scales])


def set_scale(matrix: packing.Matrix, row: int, group: int, value: float) -> None:
    """Overwrites one scale of a matrix with float scales."""
    form = Form(matrix.kind, matrix.group, scales=matrix.scales)
    per_panel, size = 64 // matrix.group, np.dtype(SCALE_TYPES[matrix.scales]).itemsize
    panel = form.panels(matrix.data, -(-matrix.rows // 16), -(-matrix.cols // 64))[group // per_panel][row // 16]
    at = (group % per_panel * 16 + row % 16) * size
    panel[at : at + size] = _stored(form, np.array([value], "<f4")).view(np.uint8)


def values_of(weight: Any) -> Array:
    """Float values of a native weight."""
    return packing.dequantize(weight, ONE_THREAD) if isinstance(weight, packing.Matrix) else np.asarray(weight)


def quantized_rows(x: Array) -> tuple[Array, Array]:
    """Activations rounded as for integer products (float64), and the quantization step of each column."""
    rows, cols = x.shape
    groups = np.zeros((rows, -(-cols // 32) * 32), np.float32)
    groups[:, :cols] = x
    groups = groups.reshape(rows, -1, 32)
    peak = np.abs(groups).max(2, keepdims=True)
    small = peak < np.float32(1e-30)
    with np.errstate(all="ignore"):
        inverse = np.where(small, np.float32(0), np.float32(127) / peak)
        scale = np.where(small, np.float32(0), peak * np.float32(1 / 127))
        quants = np.rint(groups * inverse)
    values = quants.astype(np.float64) * scale
    steps = np.broadcast_to(np.where(small, np.float32(2e-30), scale), groups.shape)
    return values.reshape(rows, -1)[:, :cols], steps.reshape(rows, -1)[:, :cols].astype(np.float64)


def rounded_rows(x: Array) -> Array:
    """Activations rounded as for bfloat16 products on PAIRED paths; subnormal numbers become 0."""
    import torch

    rounded = torch.from_numpy(x).bfloat16().float().numpy()
    return np.where(np.abs(rounded) < np.finfo(np.float32).tiny, np.float32(0), rounded)


def inputs_of(form: Form, path: str, x: Array) -> Array:
    """Activations that a matrix of this form multiplies (float64)."""
    if form.quantized:
        return quantized_rows(x)[0]
    return (rounded_rows(x) if form.rounds_rows(path) else x).astype(np.float64)


def attention_tolerance(path: str, kv_dtype: str, otherwise: float) -> float:
    """Largest error against float64; on paths with bfloat16 products about one unit of bfloat16 at 2 to 4."""
    return 1.6e-2 if path in PAIRED and kv_dtype != "float32" else otherwise


def to_e4m3(values: Array) -> Array:
    """Values rounded as by torch."""
    import torch

    return torch.from_numpy(values).to(torch.float8_e4m3fn).float().numpy()


def stored(values: Array, kv_dtype: str, dim: int) -> Array:
    """Keys or values [T, heads * dim] rounded as in a pool."""
    if kv_dtype == "bfloat16":
        import torch

        return torch.from_numpy(values).bfloat16().float().numpy()
    if kv_dtype in ("int8", "fp8"):
        heads = values.reshape(len(values), -1, dim)
        peak, largest = np.abs(heads).max(2, keepdims=True), np.float32(127 if kv_dtype == "int8" else 448)
        scale = np.where(peak < np.float32(1e-30), np.float32(0), peak * (1 / largest))
        codes = heads * (largest / np.maximum(peak, np.float32(1e-30)))
        return ((np.rint(codes) if kv_dtype == "int8" else to_e4m3(codes)) * scale).reshape(values.shape)
    return values


def attention(ops: Any, q: Any, k: Any, v: Any, pool: Any, spec: AttentionSpec, sinks: Any = None) -> Any:
    """Stores keys and values, then attends to them."""
    ops.store_kv(k, v, pool, spec)
    return ops.attend(q, pool, spec, sinks)


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of one sequence: `ids` at positions start, start + 1, ..."""

    ids: Array
    start: int
    table: Array


def plan_of(parts: Seq[Part], *, first_position: int = 0, logit_rows: Seq[int] = ()) -> StepPlan:
    positions = [part.start + np.arange(len(part.ids)) for part in parts]
    tables = np.zeros((len(parts), max(len(part.table) for part in parts)), np.int32)
    slots, before = [], []
    for i, (part, at) in enumerate(zip(parts, positions, strict=True)):
        tables[i, : len(part.table)] = part.table
        slots.append(part.table[at // BLOCK] * BLOCK + at % BLOCK)
        before.append(part.table[(at - 1) // BLOCK] * BLOCK + (at - 1) % BLOCK)
    return StepPlan(
        token_ids=np.concatenate([part.ids for part in parts]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32), slots=np.concatenate(slots).astype(np.int32),
        row_starts=np.cumsum([0] + [len(part.ids) for part in parts]).astype(np.int32), block_tables=tables,
        logit_rows=np.array(logit_rows, np.int32), first_position=first_position,
        hidden_slots=np.concatenate(before).astype(np.int32) if first_position else None, block_size=BLOCK,
    )  # fmt: skip


def single_rows(ids: Seq[int] | Array, position: int = 0) -> StepPlan:
    """A plan in which each row is a sequence with its own block; all rows are logit rows, in reverse order."""
    parts = [Part(np.array([token]), position, np.full(position // BLOCK + 1, i)) for i, token in enumerate(ids)]
    return plan_of(parts, logit_rows=range(len(ids) - 1, -1, -1))


Code = Callable[..., Mapping[str, Any]]


def backend(path: str = PATHS[0], threads: int = 1, kv_dtype: Any = "float32") -> NativeBackend:
    return NativeBackend(threads=threads, path=path, kv_dtype=kv_dtype)


def run_native(on: NativeBackend, code: Code, plan: StepPlan, hidden: Array | None = None) -> dict[str, Array]:
    """Copies of the results, whose arrays belong to the program."""
    given = None if hidden is None else np.ascontiguousarray(hidden, np.float32)
    found = on.run(on.prepare(code, hidden_width=0 if given is None else given.shape[1]), plan, hidden=given)
    return {name: np.array(value) for name, value in found.items()}


def reference_weight(weight: Any) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.array(values_of(weight), np.float64))


def run_reference(code: Code, plan: StepPlan, hidden: Array | None = None) -> dict[str, Array]:
    """Results in float64; `code` uses reference weights and pools."""
    import torch

    from headstart.kernels.reference.backend import ReferenceBackend

    given = None if hidden is None else torch.from_numpy(np.asarray(hidden, np.float64))
    found = ReferenceBackend(dtype="float64").run(code, plan, hidden=given)
    return {name: value.numpy().copy() for name, value in found.items()}


def bits(values: Array) -> Array:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def assert_same_bits(found: Mapping[str, Array], expected: Mapping[str, Array], what: object = "") -> None:
    for name, values in expected.items():
        np.testing.assert_array_equal(bits(found[name]), bits(values), err_msg=f"{name} {what}")
