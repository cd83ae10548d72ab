"""Runs programs whose weights are read from the file when an op needs them: one layer, one expert at a time.

`StreamedBackend` wraps another backend. Its weights are `LazyWeight`s, so that a whole model can be built without
reading it. `run_once` records a program on the wrapped backend. At an op that must not have all of its weights in
memory (`embed` reads only the rows in use, `moe` only experts that a row is routed to), recording ends; the op is
computed separately, and the program is recorded again with the op's result as an input.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.core import Float32, StepPlan
from headstart.formats.base import ITEM_BYTES, make_tensor
from headstart.kernels.ops import Backend, Buffer, Experts, Ops, RawTensor, RouterSpec, StepInputs
from headstart.kernels.specs import NGramSpec

Code = Callable[[Any, StepInputs, Mapping[str, Buffer]], Mapping[str, Buffer]]
"""Program code over named inputs [R, width]."""
Inputs = Mapping[str, Float32]
SeparateOp = Callable[[Inputs, StepPlan], Float32]
ROUTED_WIDTH = 32  # rows of the matrices with which routing weights are found; a size that all backends take


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A RawTensor whose values are read, and then changed by `steps`, when a kernel needs them."""

    source: RawTensor
    shape: tuple[int, ...]
    dtype: str
    name: str
    steps: tuple[Callable[[Any], Any], ...] = ()

    def read(self) -> RawTensor:
        tensor: Any = self.source
        for step in self.steps:
            tensor = step(tensor)
        return tensor  # type: ignore[no-any-return]

    def _then(self, step: Callable[[Any], Any], *shape: int, dtype: str | None = None) -> "LazyTensor":
        return replace(self, shape=shape, dtype=dtype or self.dtype, steps=(*self.steps, step))

    def fingerprint(self) -> int:
        return self.read().fingerprint()

    def float32(self) -> Float32:
        return self.read().float32()

    def take_rows(self, rows: NDArray[np.int64]) -> "LazyTensor":
        return self._then(lambda tensor: tensor.take_rows(rows), len(rows), *self.shape[1:])

    def part(self, index: int) -> "LazyTensor":
        return self._then(lambda tensor: tensor.part(index), *self.shape[1:])

    def shaped(self, *shape: int) -> "LazyTensor":
        return self._then(lambda tensor: tensor.shaped(*shape), *shape)

    def transposed(self) -> "LazyTensor":
        kept = self.dtype if self.dtype in ("BF16", "F16") else "F32"
        return self._then(lambda tensor: tensor.transposed(), *self.shape[::-1], dtype=kept)

    def plain(self) -> "LazyTensor":
        kept = self.dtype if self.dtype in ("BF16", "F16", "F32") else "F32"
        return self._then(lambda tensor: tensor.plain(), *self.shape, dtype=kept)

    def affine(self, factor: float, offset: float) -> "LazyTensor":
        return self._then(lambda tensor: tensor.affine(factor, offset), *self.shape, dtype="F32")

    def exp(self) -> "LazyTensor":
        return self._then(lambda tensor: tensor.exp(), *self.shape, dtype="F32")


def lazy(tensor: RawTensor) -> RawTensor:
    """The tensor as a LazyTensor, unless it holds integers."""
    if tensor.dtype[0] in "IU" and tensor.dtype in ITEM_BYTES:
        return tensor
    return LazyTensor(tensor, tuple(tensor.shape), tensor.dtype, tensor.name)


@dataclass(frozen=True, eq=False)
class LazyWeight:
    """A weight of a StreamedBackend."""

    tensor: RawTensor
    precise: bool = False

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def rows(self, rows: NDArray[np.int64]) -> "LazyWeight":
        return replace(self, tensor=self.tensor.take_rows(rows))

    def shifted(self, offset: float) -> "LazyWeight":
        return replace(self, tensor=self.tensor.affine(1, offset))

    def load(self, backend: Backend) -> Any:
        """The weight on a backend."""
        tensor = self.tensor.read() if isinstance(self.tensor, LazyTensor) else self.tensor
        return backend.weight(tensor, precise=self.precise)


class _SeparateOp(Exception):  # control flow: recording ends here
    """Raised at an op that `compute` runs separately, on the results `needed`."""

    def __init__(self, needed: Mapping[str, Buffer], compute: SeparateOp) -> None:
        super().__init__()
        self.needed, self.compute = needed, compute


@dataclass(eq=False)
class StreamedBackend:
    """A backend whose weights stay in their files. Attributes that are not defined here are the wrapped backend's."""

    inner: Backend
    weight_bytes: int = 0  # read so far
    _loaded: dict[LazyWeight, Any] = field(default_factory=dict)
    _routed: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def weight(self, tensor: RawTensor, *, drafts: bool = False, precise: bool = False) -> LazyWeight:
        """See Backend.weight. Weights of drafts are not rounded: that would take longer than to read them."""
        return LazyWeight(tensor, precise)

    def release(self) -> None:
        """Drops all loaded weights, and programs in reference cycles."""
        self._loaded.clear()
        gc.collect()

    def load(self, weight: Any) -> Any:
        """A weight, or several, as the wrapped backend has it; kept until `release`."""
        if isinstance(weight, tuple | list):
            return type(weight)(map(self.load, weight)) if any(isinstance(w, LazyWeight) for w in weight) else weight
        if not isinstance(weight, LazyWeight):
            return weight
        if weight not in self._loaded:
            self._loaded[weight] = weight.load(self.inner)
        return self._loaded[weight]

    def run_once(self, code: Code, plan: StepPlan, inputs: Mapping[str, Float32]) -> dict[str, Float32]:
        """Records and runs a program on `inputs` [R, width]; returns copies of its results."""
        done: list[Float32] = []
        while True:
            separate: list[_SeparateOp] = []
            results = self._run(code, plan, inputs, done, separate)
            if not separate:
                return results
            done.append(separate[0].compute(results, plan))

    def _run(
        self, code: Code, plan: StepPlan, inputs: Inputs, done: list[Float32], separate: list[_SeparateOp]
    ) -> dict[str, Float32]:
        arrays = [*inputs.values(), *done]
        widths = [each.shape[1] for each in arrays]

        def program(ops: Ops, step: StepInputs) -> Mapping[str, Buffer]:
            ends = np.cumsum(widths).tolist()
            parts = [ops.columns(step.hidden, end - width, width) for end, width in zip(ends, widths, strict=True)]
            streamed: Any = StreamedOps(ops, self, parts[len(inputs) :])
            try:
                return code(streamed, step, dict(zip(inputs, parts, strict=False)))
            except _SeparateOp as found:
                separate[:] = [found.with_traceback(None)]  # frames would keep programs in memory
                return found.needed

        handle = self.inner.prepare(program, hidden_width=sum(widths))
        if separate and not separate[0].needed:
            return {}
        pool = None
        if arrays:
            pool = self.inner.hidden_pool(plan.num_rows, sum(widths))
            content = np.ascontiguousarray(np.hstack(arrays), np.float32)
            self.inner.write_slots(pool, 0, content.reshape(-1).view(np.uint8))
        plan = replace(plan, hidden_slots=np.arange(plan.num_rows, dtype=np.int32) if arrays else None)
        outputs = self.inner.run(handle, plan, hidden_pool=pool)
        return {name: np.array(self.inner.numpy(each), np.float32) for name, each in outputs.items()}

    def rows_of(self, table: LazyWeight, ids: NDArray[np.integer]) -> Float32:
        """Ops.embed of ids [n], reading only their rows of the table."""
        used, places = np.unique(ids, return_inverse=True)
        rows = table.rows(used.astype(np.int64)).load(self.inner)
        plan = StepPlan.of_rows(places)
        return self.run_once(lambda ops, step, _: {"rows": ops.embed(rows, step.token_ids)}, plan, {})["rows"]

    def mixture(
        self, x: Float32, logits: Float32, bias: Any, experts: Experts, spec: RouterSpec, table: Any, plan: StepPlan
    ) -> Float32:
        """Ops.moe, one expert after the other. x [R, in], logits [R, E] -> [R, out]."""
        weights = self._routing(logits, bias, spec, table, plan)
        total = np.zeros((len(x), experts.down[0].tensor.shape[0]), np.float32)
        sums = weights.astype(np.float64)  # products are exact in it: sums are rounded once, like those of kernels
        for index in range(spec.num_matrices):
            rows = np.flatnonzero(weights[:, index])
            if not len(rows):
                continue
            chosen = x[rows] * weights[rows, index, None] if spec.scales_inputs else x[rows]
            factors = 1 if spec.scales_inputs else sums[rows, index, None]
            total[rows] = total[rows] + factors * self._expert(experts, index, chosen)
        return (total + sums[:, -1:] * x).astype(np.float32) if spec.num_identity else total

    def _routing(self, logits: Float32, bias: Any, spec: RouterSpec, table: Any, plan: StepPlan) -> Float32:
        """Weights of the experts [R, matrices + 1], 0 where a row is not routed to; last, the sum over identity
        experts. Found by `moe` itself with experts that return unit vectors."""
        count = spec.num_matrices
        width = -(-(count + 1) // ROUTED_WIDTH) * ROUTED_WIDTH
        if count not in self._routed:
            first = np.zeros((ROUTED_WIDTH, width), np.float32)
            first[0, -1] = 1
            units = np.zeros((count, width, ROUTED_WIDTH), np.float32)
            units[np.arange(count), np.arange(count), 0] = 1
            self._routed[count] = (self._constant(first),) * count, tuple(map(self._constant, units))
        up, down = self._routed[count]
        ones = np.zeros((len(logits), width), np.float32)
        ones[:, -1] = 1
        bias, spec = self.load(bias), replace(spec, scales_inputs=False)

        def code(ops: Any, step: StepInputs, given: Mapping[str, Buffer]) -> dict[str, Buffer]:
            by_token = None if table is None else (table, step.token_ids)
            unit = Experts((), up, down, "identity")
            return {"weights": ops.moe(given["ones"], given["logits"], bias, unit, spec, by_token)}

        found = self.run_once(code, plan, {"ones": ones, "logits": logits})["weights"]
        return np.hstack((found[:, :count], found[:, -1:]))

    def _constant(self, values: Float32) -> Any:
        tensor = make_tensor("unit", values.shape, "F32", np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return self.inner.weight(tensor, precise=True)

    def _expert(self, experts: Experts, index: int, x: Float32) -> Float32:
        """One expert's output for rows x [R, in] -> [R, out]."""
        names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
        lists = {name: getattr(experts, name) for name in names}
        taken = {name: (self._read(each[index]),) if each else () for name, each in lists.items()}
        one, spec = Experts(activation=experts.activation, **taken), RouterSpec(num_experts=1, top_k=1)
        plan = StepPlan.of_rows(np.zeros(len(x), np.int32))
        inputs = {"x": x, "logits": np.zeros((len(x), 1), np.float32)}
        return self.run_once(
            lambda ops, step, given: {"y": ops.moe(given["x"], given["logits"], None, one, spec)}, plan, inputs
        )["y"]

    def _read(self, weight: Any) -> Any:
        return weight.load(self.inner) if isinstance(weight, LazyWeight) else weight


class StreamedOps:
    """`Ops` that load weights as they are used. done: results of the first ops that were computed separately."""

    def __init__(self, ops: Ops, backend: StreamedBackend, done: list[Buffer]) -> None:
        self._ops, self._backend, self._done = ops, backend, iter(done)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op, load = getattr(self._ops, name), self._backend.load
        return lambda *args, **named: op(*map(load, args), **{key: load(each) for key, each in named.items()})

    def embed(self, table: Any, ids: Buffer) -> Buffer:
        """See Ops.embed."""
        if not isinstance(table, LazyWeight):
            return self._ops.embed(table, ids)
        return self._result({}, lambda results, plan: self._backend.rows_of(table, plan.token_ids))

    def embed_ngrams(self, table: Any, last: Buffer, spec: NGramSpec) -> Buffer:
        """See Ops.embed_ngrams."""
        if not isinstance(table, LazyWeight):
            return self._ops.embed_ngrams(table, last, spec)

        def compute(results: Mapping[str, Float32], plan: StepPlan) -> Float32:
            rows = np.stack(spec.rows(results["last"].astype(np.int64)), axis=1)
            return self._backend.rows_of(table, rows.reshape(-1)).reshape(len(rows), -1)

        return self._result({"last": last}, compute)

    def moe(
        self, x: Buffer, logits: Buffer, bias: Any, experts: Experts, spec: RouterSpec, token_experts: Any = None,
        image_bias: Any = None,
    ) -> Buffer:  # fmt: skip
        """See Ops.moe. `image_bias` is not used: these are passes over texts."""
        if not isinstance(experts.down[0], LazyWeight):
            return self._ops.moe(x, logits, self._backend.load(bias), experts, spec, token_experts)
        table = None if token_experts is None else token_experts[0]
        return self._result(
            {"x": x, "logits": logits},
            lambda got, plan: self._backend.mixture(got["x"], got["logits"], bias, experts, spec, table, plan),
        )

    def _result(
        self, needed: Mapping[str, Buffer], compute: Callable[[Mapping[str, Float32], StepPlan], Float32]
    ) -> Buffer:
        result = next(self._done, None)
        if result is None:
            raise _SeparateOp(needed, compute)
        return result
