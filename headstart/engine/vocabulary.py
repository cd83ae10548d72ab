"""Which tokens a head without a draft vocabulary of its own drafts (`--draft-vocab`): all, a list, or all by a sketch.

A sketch of the LM head (layers/sketch.py) is made from hidden states that the head reads over text which the model
writes itself. Agreement with the full LM head and cost are measured on states that it was not made from; where it
disagrees too often, or costs as much, drafts go by the full one. All is kept in the user cache, for the next start.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart import hub
from headstart.core import Request, Rows, SamplingParams, Sequence, StepPlan
from headstart.drafters.base import DraftVocabulary
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.errors import UsageError
from headstart.formats.base import Tensor
from headstart.formats.rows import Deferred
from headstart.heads.base import STATES, HeadNetwork
from headstart.kernels.ops import REFINED, Backend, Buffer, Ops, StepInputs
from headstart.layers.linear import Linear
from headstart.layers.network import Opened
from headstart.layers.sketch import LMHead, SketchedLinear, directions

FEWEST_TOKENS = 32_768
"""A smaller vocabulary costs a draft little."""
CANDIDATES = ((64, 64), (128, 128), (256, 256))
"""(dimensions, exact blocks) of sketches, cheapest first."""
USUAL = 1
"""The candidate where agreement tells nothing: drafts are accepted at given rates (synthetic acceptance)."""
AGREES, WORTH = 0.97, 0.8
"""Of the full head's first choices it must make so many, within this share of its time."""
TEXTS, STATES_WANTED, FEWEST_STATES, WRITING_S = 16, 512, 128, 0.8
"""So many texts at a time, until they have so many tokens; after that time fewer will do."""
HELD_OUT = 4
"""Every fourth text is what the sketch is judged by."""
SAMPLED_ROWS, ROWS_AT_ONCE = 8192, 4096
JUDGED_AT_ONCE, TIMED = 16, 7


@dataclass(frozen=True)
class Found:
    """What was measured: dimensions and exact blocks (0: the full LM head is best), agreement with the full head's
    first choice, and seconds of either for one row."""

    dims: int
    count: int
    agreement: float
    sketch_s: float
    full_s: float


def listed(model: Model, wanted: int | str) -> DraftVocabulary:
    """The `wanted` tokens that are likely the most frequent, if it is a number: tokenizers number tokens in the order
    of their merges, most frequent first; and those that end a text. Raises UsageError for a head that has its own."""
    if not isinstance(wanted, int) or model.head is None:
        return DraftVocabulary()
    own, vocab = model.head.draft_token_ids, model.config.vocab_size
    if own is not None or model.head.lm_head is not None:
        has = "an LM head" if own is None else f"a draft vocabulary of {len(own)} tokens"
        raise UsageError(f"--draft-vocab is {wanted}, but the head has {has} of its own", "leave --draft-vocab out")
    if wanted > vocab:
        raise UsageError(f"--draft-vocab is {wanted}, but the model has {vocab} tokens", "full drafts all of them")
    ends = sorted(token for token in model.tokenizer.eos_ids if wanted <= token < vocab)[:wanted]
    return DraftVocabulary(np.array([*range(wanted - len(ends)), *ends], np.int64))


def can_sketch(model: Model, wanted: int | str) -> bool:
    """Is a sketch to be thought of at all?"""
    head = model.head
    if wanted != "auto" or head is None or head.draft_token_ids is not None:
        return False
    return model.config.vocab_size >= FEWEST_TOKENS and (head.lm_head or model.decoder.lm_head).bias is None


def num_exact(model: Model, vocabulary: DraftVocabulary) -> int:
    """Tokens whose logits a draft computes in full."""
    own = (
        vocabulary.token_ids if model.head is None or model.head.draft_token_ids is None else model.head.draft_token_ids
    )
    if own is not None:
        return len(own)
    sketch, vocab = vocabulary.sketch, model.config.vocab_size
    return min(sketch.count * REFINED, vocab) if sketch else vocab


def sketched(engine: Engine, model: Model, identity: Mapping[str, Any]) -> SketchedLinear | None:
    """The sketch that pays, as kept or measured now; None where the full LM head is better, or where there is nothing
    to measure. The engine must be idle."""
    opened = next((each for each in engine.runner.opened if isinstance(each.network, HeadNetwork)), None)
    assert model.head
    exact = model.head.lm_head or model.decoder.lm_head
    path = hub.record_path("sketches", {**identity, "synthetic": engine.synthetic is not None})
    maker = _Maker(model.backend, exact, model.config.hidden_size, model.config.vocab_size, path.with_suffix(".npy"))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = Found(**json.loads(path.read_text())["found"])
        return maker.kept(found)
    states = _states(engine, opened) if opened else None
    if states is None:
        return None
    sketch, found = maker.best(states, judged=engine.synthetic is None)
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        hub.keep_record(path, {"found": asdict(found), "of": identity})
    return sketch


def _states(engine: Engine, opened: Opened) -> tuple[Buffer, NDArray[np.int32], NDArray[np.int32]] | None:
    """What the LM head of the network reads over texts that the model writes: states [R, H], and the rows of those to
    learn from and those to judge by. None where nothing can be written."""
    rng, names = np.random.default_rng(0), list[str]()
    texts = min(TEXTS, engine.config.max_num_seqs)
    length = min(STATES_WANTED // texts, engine.max_length - 1)
    for index in range(texts):
        prompt = (int(rng.integers(engine.runner.vocab_size)),)
        params = SamplingParams(max_tokens=length, temperature=1.0)
        name = f"vocabulary-{index}"
        engine.submit(
            Request(request_id=name, prompt_ids=prompt, params=params, seed=index, stop_ids=frozenset(), depth=0)
        )
        names.append(name)
    try:
        begun, written = time.perf_counter(), 0
        while written < texts * (length - 1) and (written < FEWEST_STATES or time.perf_counter() - begun < WRITING_S):
            engine.step(lambda deltas: None)
            written += texts
        return _read(engine, opened, [each for each in engine.scheduler.running if len(each.tokens) > 2])
    finally:
        for name in names:
            engine.abort(name)
        engine.reset_stats()


def _read(
    engine: Engine, opened: Opened, texts: list[Sequence]
) -> tuple[Buffer, NDArray[np.int32], NDArray[np.int32]] | None:
    if not texts:
        return None
    first = opened.network.first_position
    parts = [Rows(text, first, text.tokens[first : text.num_computed], 0) for text in texts]
    parts[-1] = replace(parts[-1], num_logits=1)
    states = engine.runner.run(opened, STATES, parts)["states"]
    ends = np.cumsum([len(part.token_ids) for part in parts])
    text_of = np.searchsorted(ends, np.arange(ends[-1]), side="right")
    judges = text_of % HELD_OUT == HELD_OUT - 1 if len(texts) >= HELD_OUT else np.arange(ends[-1]) % HELD_OUT == 0
    return states, np.flatnonzero(~judges).astype(np.int32), np.flatnonzero(judges).astype(np.int32)


@dataclass(frozen=True)
class _Maker:
    """Sketches of one LM head [vocab, hidden]; `path`: where their directions are kept."""

    backend: Backend
    exact: Linear
    hidden: int
    vocab: int
    path: Path

    def kept(self, found: Found) -> SketchedLinear | None:
        """Raises OSError or ValueError where the file is not what was written."""
        if not found.count:
            return None
        project, spread = np.load(self.path, mmap_mode=None)
        if project.shape != (found.dims, self.hidden) or spread.shape != project.shape:
            raise ValueError("directions of another size")
        return self._sketch(project, spread, found.count)

    def best(
        self, states: tuple[Buffer, NDArray[np.int32], NDArray[np.int32]], *, judged: bool
    ) -> tuple[SketchedLinear | None, Found]:
        """The cheapest that agrees; where that cannot be `judged`, the usual one."""
        buffer, learns, judges = states
        rows = self._rows(np.random.default_rng(0).choice(self.vocab, min(SAMPLED_ROWS, self.vocab), replace=False))
        project, spread = directions(rows, self.backend.numpy(self.backend.rows(buffer, learns)), CANDIDATES[-1][0])
        test = self.backend.rows(buffer, judges)
        first, full_s = self._measure(self.exact, test)
        full = Found(0, 0, 1.0, full_s, full_s)
        for dims, count in CANDIDATES if judged else CANDIDATES[USUAL : USUAL + 1]:
            if dims >= self.hidden or count * REFINED >= self.vocab:
                break
            self.path.parent.mkdir(parents=True, exist_ok=True)
            np.save(self.path, np.stack((project[:dims], spread[:dims])))
            sketch = self._sketch(project[:dims], spread[:dims], count)
            guess, seconds = self._measure(sketch, test)
            found = Found(dims, count, float((guess == first).mean()), seconds, full_s)
            if seconds > WORTH * full_s:
                break
            if found.agreement >= AGREES or not judged:
                return sketch, found
        return None, full

    def _sketch(self, project: NDArray[np.float32], spread: NDArray[np.float32], count: int) -> SketchedLinear:
        with self.backend.reading([self.path]):
            data = np.ascontiguousarray(project).view(np.uint8).reshape(-1)
            narrow = Tensor("draft_sketch.project", project.shape, "F32", data, 0, data.nbytes)
            scan = _Scan("draft_sketch.scan", (self.vocab, len(spread)), spread, self._rows)
            return SketchedLinear(
                self.exact, self.backend.weight(narrow, precise=True), self.backend.weight(scan, drafts=True), count
            )

    def _rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of the LM head [n, hidden]."""

        def code(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            return {"rows": ops.embed(self.exact.weight, step.token_ids)}

        handle = self.backend.prepare(code)
        return np.concatenate([
            self.backend.numpy(self.backend.run(handle, _plan(part))["rows"]).copy() for part in _parts(ids)
        ])  # fmt: skip

    def _measure(self, lm_head: LMHead, states: Buffer) -> tuple[NDArray[np.int64], float]:
        """Its first choice for each state, and the seconds that one takes by itself."""

        def code(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            return {"logits": lm_head(ops, ops.take_rows(step.hidden, step.logit_rows))}

        handle, choices, seconds = self.backend.prepare(code, hidden_width=self.hidden), list[int](), list[float]()
        for begin in range(0, len(states), JUDGED_AT_ONCE):
            part = np.arange(begin, min(begin + JUDGED_AT_ONCE, len(states)), dtype=np.int32)
            logits = self.backend.run(handle, _plan(part), hidden=self.backend.rows(states, part))["logits"]
            choices += self.backend.numpy(logits).argmax(1).tolist()
        one = self.backend.rows(states, np.zeros(1, np.int32))
        plan = _plan(np.zeros(1, np.int32))
        for _ in range(TIMED):
            begun = time.perf_counter()
            self.backend.run(handle, plan, hidden=one)
            seconds.append(time.perf_counter() - begun)
        return np.array(choices), min(seconds)


@dataclass(frozen=True, eq=False)
class _Scan(Deferred):
    """The RawTensor B w of all rows w of the LM head, made some rows at a time."""

    name: str
    shape: tuple[int, ...]
    spread: NDArray[np.float32]
    rows: Callable[[NDArray[np.int64]], NDArray[np.float32]]
    dtype: str = "F32"

    def fingerprint(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self.spread).data)

    def read(self) -> Tensor:
        return self.take_rows(np.arange(self.shape[0]))

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        found = np.concatenate([self.rows(part) @ self.spread.T for part in _parts(rows)])
        data = found.view(np.uint8).reshape(-1)
        return Tensor(self.name, found.shape, "F32", data, 0, data.nbytes)

    def part(self, index: int) -> Tensor:
        return self.take_rows(np.array([index])).part(0)


def _parts(ids: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, len(ids), ROWS_AT_ONCE):
        yield ids[begin : begin + ROWS_AT_ONCE]


def _plan(tokens: NDArray[np.integer]) -> StepPlan:
    """A pass over rows that have a token each, and nothing else; the logits of all are wanted."""
    rows = np.arange(len(tokens), dtype=np.int32)
    return StepPlan(
        token_ids=tokens.astype(np.int32),
        positions=rows,
        slots=np.zeros_like(rows),
        row_starts=np.array([0, len(rows)], np.int32),
        block_tables=np.zeros((1, 1), np.int32),
        logit_rows=rows,
    )
