"""Which tokens a head without a draft vocabulary of its own drafts (`--draft-vocab`): all, a list, or all by a sketch.

A sketch of the LM head (layers/sketch.py) is made from hidden states that the LM head reads over a text. Agreement with
the full LM head and cost are measured on states that it was not made from; where it disagrees too often, or costs as
much, drafts go by the full one. All is kept in the user cache, for the next start.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart import hub
from headstart.core import Request, Rows, SamplingParams, Sequence, StepPlan
from headstart.drafters.base import DraftVocabulary
from headstart.drafters.block import FEATURES, BlockNetwork, block_rows
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.engine.sample_text import TEXT
from headstart.errors import UsageError
from headstart.formats.base import Tensor, make_tensor
from headstart.formats.rows import Deferred
from headstart.heads.base import STATES, BlockSpec, Head, HeadNetwork
from headstart.heads.kind import head_kind
from headstart.kernels.ops import REFINED, Backend, Buffer, Ops, StepInputs
from headstart.layers.linear import Linear
from headstart.layers.network import Opened
from headstart.layers.sketch import LMHead, SketchedLinear, directions

FEWEST_TOKENS = 32_768
"""A smaller vocabulary costs a draft little."""
CANDIDATES = ((128, 128), (256, 256))
"""(dimensions, exact blocks) of sketches, cheapest first."""
AGREES, WORTH = 0.95, 0.8
"""Of the full head's first choices it must make so many, within this share of its time."""
HELD_OUT = 4
"""The last quarter of the text is what the sketch is judged by."""
SAMPLED_ROWS, ROWS_AT_ONCE = 4096, 4096
NAME, FEWEST_STATES = "vocabulary", 16
LISTS = ("head", "block")
"""Drafters that take a list of tokens."""
JUDGED_AT_ONCE, TIMED = 16, 7
LONGEST = 32
"""Tokens that a piece of text may go on for while the others are read."""
BATCH = 16
"""So many sequences at a time, if so many may run, must not draft more slowly than by the full LM head."""


@dataclass(frozen=True)
class Found:
    """What was measured: dimensions and exact blocks (0: the full LM head is best), agreement with the full head's
    first choice, and seconds of either for one row and for a batch."""

    dims: int
    count: int
    agreement: float
    sketch_s: tuple[float, ...]
    full_s: tuple[float, ...]


def listed(model: Model, wanted: int | str) -> DraftVocabulary:
    """The `wanted` tokens that are likely the most frequent, if it is a number: tokenizers number tokens in the order
    of their merges, most frequent first; and those that end a text. Raises UsageError for a head that has its own, or
    cannot draft a part of its tokens."""
    if not isinstance(wanted, int) or model.head is None:
        return DraftVocabulary()
    vocab = model.config.vocab_size
    if why := _why_all(model.head):
        raise UsageError(f"--draft-vocab is {wanted}, but {why}", "leave --draft-vocab out")
    if wanted > vocab:
        raise UsageError(f"--draft-vocab is {wanted}, but the model has {vocab} tokens", "full drafts all of them")
    ends = sorted(token for token in model.tokenizer.eos_ids if wanted <= token < vocab)[:wanted]
    return DraftVocabulary(np.array([*range(wanted - len(ends)), *ends], np.int64))


def _why_all(head: Head) -> str:
    """Why it drafts the tokens that it drafts, and no others; nothing where it could."""
    kind = head_kind(head.spec.kind)
    if kind.drafter not in LISTS:
        return f"a {kind.title} drafts all tokens that it has"
    if head.draft_token_ids is not None:
        return f"the head has a draft vocabulary of {len(head.draft_token_ids)} tokens of its own"
    if head.lm_heads:
        return "each module of the head has an LM head of its own"
    return "its Markov head is one of all tokens" if head.spec.block and head.spec.block.markov_rank else ""


def can_sketch(model: Model, wanted: int | str) -> bool:
    """Is a sketch to be thought of at all?"""
    head = model.head
    if wanted != "auto" or head is None or head.draft_token_ids is not None or head.lm_heads:
        return False
    return model.config.vocab_size >= FEWEST_TOKENS and (head.lm_head or model.decoder.lm_head).bias is None


def num_exact(model: Model, vocabulary: DraftVocabulary) -> int:
    """Tokens whose logits a draft computes in full."""
    own, vocab = model.head.draft_token_ids if model.head else None, model.config.vocab_size
    ids = vocabulary.token_ids if own is None else own
    if ids is not None:
        return len(ids)
    return min(vocabulary.sketch.count * REFINED, vocab) if vocabulary.sketch else vocab


def sketched(engine: Engine, model: Model, identity: Mapping[str, Any]) -> SketchedLinear | None:
    """The sketch that pays, as kept or measured now; None where the full LM head is better, or where there is nothing
    to measure. The engine must be idle."""
    opened = next((each for each in engine.runner.opened if isinstance(each.network, HeadNetwork | BlockNetwork)), None)
    assert model.head
    exact = model.head.lm_head or model.decoder.lm_head
    batch, sizes = min(BATCH, engine.config.max_num_seqs), (model.config.hidden_size, model.config.vocab_size)
    block = model.head.spec.block
    known = {**identity, **({"rows": block.block_size} if block else {})}
    path = hub.record_path("sketches", {**known, "synthetic": engine.synthetic is not None, "batch": batch})
    rows = block.block_size if block else 1
    maker = _Maker(model.backend, exact, *sizes, path.with_suffix(".npy"), (rows, rows * batch))
    with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError):
        found = Found(**json.loads(path.read_text())["found"])
        return maker.kept(found)
    tokens = [token for token in model.tokenizer.encode(TEXT, add_special=True) if token < model.config.vocab_size]
    if opened is None:
        return None
    try:
        if (states := _states(engine, opened, tokens)) is None or len(states) < FEWEST_STATES:
            return None
        sketch, found = maker.best(states, judged=engine.synthetic is None)
    except np.linalg.LinAlgError:  # a broken head; inspect and the server's log say so
        return None
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        hub.keep_record(path, {"found": asdict(found), "of": known})
    return sketch


def _states(engine: Engine, opened: Opened, tokens: Seq[int]) -> Buffer | None:
    """What the LM head of the network reads over a text: states [R, H]; None where there is no room for them."""
    block = opened.network.module.spec if isinstance(opened.network, BlockNetwork) else None
    if block:
        prompts = _pieces(engine, tokens, block)
    else:
        prompts = [tuple(tokens[: max(min(engine.max_length - 3, engine.scheduler.budget), 0)])]
    if not prompts or not prompts[0]:
        return None
    params = SamplingParams(max_tokens=LONGEST if block else 2)  # all are read before one of them ends
    requests = [
        Request(request_id=f"{NAME} {i}", prompt_ids=each, params=params, seed=0, stop_ids=frozenset(), depth=0)
        for i, each in enumerate(prompts)
    ]
    sequences = [sequence for request in requests for sequence in engine.submit(request)]
    try:
        while engine.has_work and any(each.num_computed < len(each.request.prompt_ids) for each in sequences):
            engine.step(lambda deltas: None)
        rows = _at_ends(engine, opened, sequences, block) if block else _whole(opened, sequences[0])
        return engine.runner.run(opened, STATES, rows)["states"]
    finally:
        for request in requests:
            engine.abort(request.request_id)
        engine.reset_stats()


def _whole(opened: Opened, sequence: Sequence) -> list[Rows]:
    first = opened.network.first_position
    return [Rows(sequence, first, sequence.request.prompt_ids[first:], 1)]


def _pieces(engine: Engine, tokens: Seq[int], block: BlockSpec) -> list[tuple[int, ...]]:
    """Of a text, sequences at the same time: a block lies at the end of each, behind twice as many tokens."""
    length = 3 * block.rows_for(block.block_size)
    room = len(engine.memory.pool.blocks) // -(-(length + LONGEST) // engine.config.block_size)
    count = min(min(len(tokens), engine.scheduler.budget) // length, engine.config.max_num_seqs, room)
    if length + LONGEST >= engine.max_length:
        return []
    return [tuple(tokens[i * length : (i + 1) * length]) for i in range(count)]


def _at_ends(engine: Engine, opened: Opened, sequences: Seq[Sequence], block: BlockSpec) -> list[Rows]:
    """Blocks over the last tokens of prompts, whose features before are made first."""
    size, prompts = block.rows_for(block.block_size), [each.request.prompt_ids for each in sequences]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.runner.run(opened, FEATURES, [Rows(sequence, 0, prompt[:-size], 0)])
    return [
        block_rows(block, sequence, len(prompt) - size, block.block_size)
        for sequence, prompt in zip(sequences, prompts, strict=True)
    ]


@dataclass(frozen=True)
class _Maker:
    """Sketches of one LM head [vocab, hidden]; `path`: where their directions are kept; `rows`: of a pass of one
    sequence, and of a batch."""

    backend: Backend
    exact: Linear
    hidden: int
    vocab: int
    path: Path
    rows: tuple[int, int]

    def kept(self, found: Found) -> SketchedLinear | None:
        """Raises OSError or ValueError where the file is not what was written."""
        if not found.count:
            return None
        project, spread = np.load(self.path, mmap_mode=None)
        if project.shape != (found.dims, self.hidden) or spread.shape != project.shape:
            raise ValueError("directions of another size")
        return self._sketch(project, spread, found.count)

    def best(self, states: Buffer, *, judged: bool) -> tuple[SketchedLinear | None, Found]:
        """The cheapest that agrees; where that cannot be `judged` (drafts are accepted at given rates), the first."""
        rows = np.arange(len(states), dtype=np.int32)
        is_held = rows >= len(rows) - len(rows) // HELD_OUT
        learns, test = (self.backend.rows(states, rows[held]) for held in (~is_held, is_held))
        some = np.random.default_rng(0).permutation(self.vocab)[:SAMPLED_ROWS]
        project, spread = directions(self._rows(some), self.backend.numpy(learns), CANDIDATES[-1][0])
        first, full_s = self._measure(self.exact, test)
        full = Found(0, 0, 1.0, full_s, full_s)
        for dims, count in CANDIDATES:
            if dims >= self.hidden or count * REFINED >= self.vocab:
                break
            with contextlib.suppress(OSError):  # packed weights are kept by the file that they come from
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=self.path.parent, suffix=".tmp", delete=False) as file:
                    np.save(file, np.stack((project[:dims], spread[:dims])))
                Path(file.name).replace(self.path)
            sketch = self._sketch(project[:dims], spread[:dims], count)
            guess, seconds = self._measure(sketch, test)
            found = Found(dims, count, float((guess == first).mean()), seconds, full_s)
            if seconds[0] > WORTH * full_s[0] or seconds[-1] > max(WORTH, 1) * full_s[-1]:
                break  # its cost grows with the rows, that of the full one hardly does
            if found.agreement >= AGREES or not judged:
                return sketch, found
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        return None, full

    def _sketch(self, project: NDArray[np.float32], spread: NDArray[np.float32], count: int) -> SketchedLinear:
        with self.backend.reading([self.path]):
            narrow = _tensor("draft_sketch.project", project)
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

    def _measure(self, lm_head: LMHead, states: Buffer) -> tuple[NDArray[np.int64], tuple[float, ...]]:
        """Its first choice for each state, and the seconds that one row takes, and that a batch does."""

        def code(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            return {"logits": lm_head(ops, ops.take_rows(step.hidden, step.logit_rows))}

        handle, choices, seconds = self.backend.prepare(code, hidden_width=self.hidden), list[int](), []
        for begin in range(0, len(states), JUDGED_AT_ONCE):
            part = np.arange(begin, min(begin + JUDGED_AT_ONCE, len(states)), dtype=np.int32)
            logits = self.backend.run(handle, _plan(part), hidden=self.backend.rows(states, part))["logits"]
            choices += self.backend.numpy(logits).argmax(1).tolist()
        for count in self.rows:
            part = np.arange(count, dtype=np.int32) % len(states)
            given, plan, taken = self.backend.rows(states, part), _plan(part), list[float]()
            for _ in range(TIMED):
                begun = time.perf_counter()
                self.backend.run(handle, plan, hidden=given)
                taken.append(time.perf_counter() - begun)
            seconds.append(min(taken))
        return np.array(choices), tuple(seconds)


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
        return _tensor(self.name, found)

    def part(self, index: int) -> Tensor:
        return self.take_rows(np.array([index])).part(0)


def _tensor(name: str, values: NDArray[np.float32]) -> Tensor:
    return make_tensor(name, values.shape, "F32", np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1))


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
