"""The trunk over given texts (teacher forcing), layer by layer, for a model of any size.

A `StreamedBackend` reads one layer at a time and of its experts those in use; hidden states of the batch are handed
from layer to layer. They are kept in the user's cache folder until the measurement ends, so that an interrupted run
goes on after its last finished layer.
"""

import hashlib
import io
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart import hub
from headstart.core import Float32, Progress, StepPlan
from headstart.engine.load import Model
from headstart.engine.runner import whole_sequences_plan
from headstart.files import write_atomic
from headstart.formats.json_object import read_packaged
from headstart.kernels.ops import AttentionSpec, IndexSpec, Pool, StepInputs
from headstart.kernels.streamed import LazyWeight, StreamedBackend
from headstart.layers.decoder import DecoderProgram, ForwardState, tapped_layers
from headstart.layers.linear import Linear, LMHead
from headstart.layers.parts import join_pools
from headstart.version import __version__

MAX_TOKENS = 96  # of each text
CHUNK_VALUES = 1 << 24  # values of an LM head that are in memory at a time
BLOCK = 16  # positions
STATE = ("embedded", "residual", "delta", "pending", "tapped")  # fields of ForwardState between layers


def builtin_texts(model: Model) -> list[list[int]]:
    """Token ids of the built-in texts, [1, MAX_TOKENS] each."""
    texts = read_packaged("headstart.tools", "deep_texts.json")
    return [model.tokenizer.encode(text, add_special=True)[:MAX_TOKENS] for text in texts]


@dataclass(eq=False)
class TeacherForcedTrunk:
    """A trunk's outputs for texts of R tokens together."""

    model: Model
    backend: StreamedBackend
    texts: list[list[int]]
    plan: StepPlan
    states: Mapping[str, Float32]  # by tap: `post_norm`, `pre_norm` [R, H], `streams`, `layers` [R, taps * H]
    best: NDArray[np.int64]  # [R] argmax of the logits

    def argmax(self, states: Float32, head: LMHead | None = None) -> NDArray[np.int64]:
        """Most likely tokens [n] of states [n, H] after the final norm, by the trunk's LM head or another one; of equal
        logits the lowest. The LM head is read in parts."""
        return _argmax(self.model, self.backend, states, head)


def run_trunk(
    model: Model, texts: Seq[Seq[int]], progress: Progress, saved: "SavedStates | None" = None
) -> TeacherForcedTrunk:
    """Runs the model's trunk over texts (token ids). saved: where states are kept for another run."""
    taps = tapped_layers(model.head.spec.tap) if model.head else ()
    backend = model.backend if isinstance(model.backend, StreamedBackend) else StreamedBackend(model.backend)
    plan = whole_sequences_plan(texts)
    layers = _Layers(model, backend, plan, taps)
    first, state = saved.read() if saved else (0, {})
    state = state or layers.begin()
    layer_progress = _LayerProgress(model, progress, first)
    for segment in layers.segments():
        if segment[0] < first:
            continue
        layer_progress.before(segment[0])
        state = layers.run(segment, state)
        backend.release()
        layer_progress.done += len(segment)
        if saved and not layers.kept:
            saved.write(segment[-1] + 1, state)
    states = layers.end(state)
    best = _argmax(model, backend, states["post_norm"], None)
    return TeacherForcedTrunk(model, backend, [list(text) for text in texts], plan, states, best)


class _Layers:
    """The layers of a trunk, run one by one over one plan."""

    def __init__(self, model: Model, backend: StreamedBackend, plan: StepPlan, taps: tuple[int, ...]) -> None:
        self.decoder, self.backend, self.plan = model.decoder, backend, plan
        self.kept: dict[int, tuple[Pool, ...]] = {}  # pools that later layers read, by layer
        self.sources = [layer.mixer.config.source_layer for layer in self.decoder.layers]
        self._num_slots = BLOCK * (int(plan.block_tables.max()) + 1)
        self._taps = taps

    def segments(self) -> Iterator[list[int]]:
        """Layers that run together: those that use positions selected in another one, and those between."""
        mixers = [layer.mixer for layer in self.decoder.layers]
        first = list(range(len(mixers)))
        for index, source in enumerate(self.sources):
            if source is not None and any(isinstance(spec, IndexSpec) for spec in mixers[source].kv_specs):
                first[source : index + 1] = [first[source]] * (index + 1 - source)
        start = 0
        for index in range(1, len(first) + 1):
            if index == len(first) or first[index] == index:
                yield list(range(start, index))
                start = index

    def begin(self) -> dict[str, Float32]:
        program = self._program([])

        def code(ops: Any, step: StepInputs, given: Mapping[str, Any]) -> dict[str, Any]:
            return _fields(program.begin(ops, step))

        state = self.backend.run_once(code, self.plan, {})
        self.backend.release()
        return state

    def run(self, segment: list[int], state: Mapping[str, Float32]) -> dict[str, Float32]:
        """The state after the layers of a segment."""
        for index in segment:
            layer = self.decoder.layers[index]
            pools = [self.backend.kv_pool(self._num_slots, unlimited(spec)) for spec in layer.mixer.kv_specs]
            self.kept[index] = (*pools, *(self.backend.state_pool(0, 0, 0, spec) for spec in layer.state_specs))
        program = self._program(segment)

        def code(ops: Any, step: StepInputs, given: Mapping[str, Any]) -> dict[str, Any]:
            found = ForwardState(step.token_ids, **given)
            for index in segment:
                program.run_layer(ops, step, found, index)
            return _fields(found)

        found = self.backend.run_once(code, self.plan, state)
        needed = {source for source in self.sources[segment[-1] + 1 :] if source is not None}
        self.kept = {index: pools for index, pools in self.kept.items() if index in needed}
        return found | {"embedded": state["embedded"]}

    def end(self, state: Mapping[str, Float32]) -> dict[str, Float32]:
        program = self._program([])

        def code(ops: Any, step: StepInputs, given: Mapping[str, Any]) -> dict[str, Any]:
            found = ForwardState(step.token_ids, **given)
            return dict(zip(("post_norm", "pre_norm", "streams"), program.end(ops, found), strict=True))

        states = self.backend.run_once(code, self.plan, state)
        self.backend.release()
        return states | ({"layers": state["tapped"]} if "tapped" in state else {})

    def _program(self, segment: list[int]) -> DecoderProgram:
        pools: list[Pool] = [None] * len(self.sources)
        for index in segment:
            pools[index] = self._pool_of(index)
        return DecoderProgram(self.decoder, pools, None, self._taps or "streams")

    def _pool_of(self, layer: int) -> Pool:
        """The pools of a layer and of the layers whose keys and values it reads."""
        own, source = list(self.kept[layer]), self.sources[layer]
        return join_pools(own if source is None else [*own, self._pool_of(source)])


def _fields(state: ForwardState) -> dict[str, Any]:
    return {name: value for name in STATE if (value := getattr(state, name)) is not None}


def unlimited(spec: Any) -> Any:
    """The spec of a pool, which keeps all positions."""
    return replace(spec, window=0) if isinstance(spec, AttentionSpec) else spec


def _argmax(model: Model, backend: StreamedBackend, states: Float32, head: LMHead | None) -> NDArray[np.int64]:
    rows = np.arange(len(states), dtype=np.int32)
    plan = whole_sequences_plan([[0] * len(rows)])
    best, top = np.zeros(len(rows), np.int64), np.full(len(rows), -np.inf, np.float32)
    for begin, part in _parts_of(model.decoder.lm_head if head is None else head):
        trunk: Any = replace(model.decoder, lm_head=part) if head is None else None  # type: ignore[arg-type]

        def code(
            ops: Any, step: StepInputs, given: Mapping[str, Any], part: LMHead = part, trunk: Any = trunk
        ) -> dict[str, Any]:
            x = given["states"]
            return {"logits": part(ops, x) if trunk is None else trunk.logits(ops, x)}

        logits = backend.run_once(code, plan, {"states": states})["logits"]
        found = logits.argmax(-1)
        values = logits[rows, found]
        best = np.where(values > top, begin + found, best)
        top = np.maximum(top, values)
        backend.release()
    return best


def _parts_of(head: LMHead) -> Iterator[tuple[int, LMHead]]:
    """(first token, LM head of neighbouring tokens): all, or parts of a head that is not loaded."""
    weight = getattr(head, "weight", None)
    if not isinstance(head, Linear) or not isinstance(weight, LazyWeight) or head.bias is not None:
        yield 0, head
        return
    count, width = weight.tensor.shape
    step = max(CHUNK_VALUES // width // 64, 1) * 64
    for begin in range(0, count, step):
        yield begin, Linear(weight.rows(np.arange(begin, min(begin + step, count))))


@dataclass
class _LayerProgress:
    """Progress text before each layer: bytes left to read and, from the second layer on, the estimated time left."""

    model: Model
    progress: Progress
    first: int
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def before(self, layer: int) -> None:
        config, tensors = self.model.config, self.model.checkpoint.tensors.values()
        total = sum(tensor.nbytes for tensor in tensors)
        sizes = [each.cost(config.hidden_size).weights for each in config.layers]
        scale = total / max(sum(sizes), 1)
        left = scale * sum(sizes[layer:])
        text = f"reading layer {layer + 1} of {len(sizes)}, {left / 1e9:.3g} GB to read"
        if self.done:
            read = scale * sum(sizes[self.first : layer])
            seconds = (time.monotonic() - self.started) * left / max(read, 1)
            text += f", about {_duration(seconds)}"
        self.progress(int(sum(sizes[:layer]) / 1e6), int(sum(sizes) / 1e6), text)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class SavedStates:
    """The state after the last finished layer of an unfinished run: a file in the user's cache folder."""

    path: Path

    @classmethod
    def of(cls, model: Model, texts: Seq[Seq[int]]) -> "SavedStates":
        """The file of this checkpoint, these texts and taps, this package and backend."""
        tap = model.head.spec.tap if model.head else None
        facts = [hub.file_stamps(model.checkpoint.files), texts, tapped_layers(tap or "post_norm"), __version__]
        head = model.head.source if model.head else "none"
        facts += [model.backend.fingerprint(), hub.file_stamps(sorted(Path(head).glob("*")))]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
        return cls(hub.cache_dir() / "inspect" / f"{digest}.npz")

    def read(self) -> tuple[int, dict[str, Float32]]:
        """(layers that are finished, the state after them); (0, {}) without a readable file."""
        with suppress(OSError, ValueError, KeyError), np.load(self.path, allow_pickle=False) as file:
            return int(file["layers"]), {name: file[name] for name in STATE if name in file}
        return 0, {}

    def write(self, layers: int, state: Mapping[str, Float32]) -> None:
        """Replaces the file. On a full disk nothing is saved, and the run continues."""
        content = io.BytesIO()
        np.savez(content, allow_pickle=False, layers=np.array(layers), **state)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, content.getbuffer())

    def counted(self, what: str, count: Callable[[], list[list[int]]]) -> list[list[int]]:
        """The result of `count` for one reading of a head, from the file of an earlier run if it is there."""
        path, known = self.path.with_suffix(".json"), dict[str, list[list[int]]]()
        with suppress(OSError, ValueError):
            known = json.loads(path.read_bytes())
        if what not in known:
            known[what] = count()
            with suppress(OSError):
                write_atomic(path, json.dumps(known))
        return known[what]

    def remove(self) -> None:
        for path in (self.path, self.path.with_suffix(".json")):
            path.unlink(missing_ok=True)
