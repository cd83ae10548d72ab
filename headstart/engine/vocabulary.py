"""Draft vocabulary of a head (`--draft-vocab`): all tokens, the most frequent ones, or all with a sketched LM head.

A sketch of the LM head (layers/linear.py) is built from hidden states over a sample text. Its agreement with the full
LM head and its cost are measured on held-out states; if it disagrees too often or costs as much, the full LM head is
used. The result is stored in the user cache.
"""

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

from headstart import hub, registry
from headstart.core import Request, Rows, SamplingParams, Sequence, StepPlan
from headstart.drafters.base import DraftVocabulary
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.errors import ParameterError
from headstart.formats.base import Tensor, make_tensor
from headstart.formats.rows import Deferred
from headstart.heads.base import STATES, BlockSpec, Head, HeadNetwork
from headstart.heads.kind import head_kind
from headstart.kernels.ops import REFINED, Backend, Buffer, Ops, StepInputs
from headstart.layers.linear import Linear, LMHead, SketchedLinear, sketch_directions
from headstart.layers.network import NetworkHandle
from headstart.wording import LEAVE_OUT, option

TEXT_FILE = Path(__file__).with_name("sketch_text.txt")
"""Sample text of many kinds, written for this project, to produce typical hidden states."""
MIN_VOCAB = 32_768  # no sketch for smaller vocabularies, whose LM head is cheap
CANDIDATES = ((128, 128), (256, 256))  # (dimensions, exact blocks) of sketches, cheapest first
MIN_AGREEMENT, MAX_TIME_SHARE = 0.95, 0.8  # required share of equal first choices, and time relative to the full head's
HELD_OUT = 4  # 1 / HELD_OUT of the states, the last ones, measure the sketch
SAMPLED_ROWS, ROWS_PER_PASS = 4096, 4096  # LM head rows that fit the directions; rows that one pass reads
MIN_STATES = 16  # fewest states that a sketch is fitted to
STATES_PER_PASS, TIMED_RUNS = 16, 7  # states whose first choices one pass computes; runs of which the fastest counts
MAX_PIECE_TOKENS = 32  # output tokens of a piece of text while other pieces are still in their prompts
BATCH = 16  # batch size (or max_num_seqs if smaller) in which a sketch must not be slower than the full LM head


@dataclass(frozen=True)
class SketchBenchmark:
    """Size and agreement of a sketch, as measured."""

    dims: int  # dimensions of the sketch
    count: int  # blocks of tokens computed exactly; 0: the full LM head is better
    agreement: float  # share of equal first choices


def reduced_vocabulary(model: Model, wanted: int | str) -> DraftVocabulary:
    """The `wanted` tokens that are likely most frequent (tokenizers number tokens in the order of their merges, most
    frequent first), and those that end a text; the full vocabulary unless `wanted` is a number.

    Raises UsageError for a head with its own draft vocabulary, or one that cannot draft a part of the tokens.
    """
    if not isinstance(wanted, int) or model.head is None:
        return DraftVocabulary()
    vocab = model.config.vocab_size
    if why := _why_fixed(model.head):
        raise ParameterError(option("draft_vocab"), f"is {wanted}, but {why}", LEAVE_OUT)
    if wanted > vocab:
        what = f"is {wanted}, but the model has {vocab} tokens"
        raise ParameterError(option("draft_vocab"), what, "full drafts all of them")
    ends = sorted(token for token in model.tokenizer.eos_ids if wanted <= token < vocab)[:wanted]
    return DraftVocabulary(np.array([*range(wanted - len(ends)), *ends], np.int64))


def _why_fixed(head: Head) -> str:
    """Why the head's draft vocabulary cannot be reduced; empty if it can."""
    kind = head_kind(head.spec.kind)
    if not registry.find("drafters", kind.drafter).DRAFTER.takes_vocabulary:
        return f"a {kind.title} drafts all tokens that it has"
    if head.draft_token_ids is not None:
        return f"the head has a draft vocabulary of {len(head.draft_token_ids)} tokens of its own"
    if head.lm_heads:
        return "each module of the head has an LM head of its own"
    return "its Markov head covers all tokens" if head.spec.block and head.spec.block.markov_rank else ""


def can_sketch(model: Model, wanted: int | str) -> bool:
    """True if a sketch may pay for this model."""
    head = model.head
    if wanted != "auto" or head is None or not head.modules or head.draft_token_ids is not None or head.lm_heads:
        return False  # a draft model has no modules
    return model.config.vocab_size >= MIN_VOCAB and (head.lm_head or model.decoder.lm_head).bias is None


def num_exact(model: Model, vocabulary: DraftVocabulary) -> int:
    """Number of logits that a draft computes exactly."""
    own, vocab = model.head.draft_token_ids if model.head else None, model.config.vocab_size
    ids = vocabulary.token_ids if own is None else own
    if ids is not None:
        return len(ids)
    return min(vocabulary.sketch.count * REFINED, vocab) if vocabulary.sketch else vocab


def find_sketch(engine: Engine, model: Model, identity: Mapping[str, Any]) -> SketchedLinear | None:
    """The sketch that pays, stored or measured now, while the engine is idle; None: the full LM head is better."""
    from headstart.drafters.block import BlockNetwork  # rarely needed: few vocabularies are large enough

    assert model.head
    exact, block = model.head.lm_head or model.decoder.lm_head, model.head.spec.block
    batch, rows = min(BATCH, engine.config.max_num_seqs), block.block_size if block else 1
    known = {**identity, **({"rows": rows} if block else {})}
    path = hub.record_path("sketches", {**known, "synthetic": engine.synthetic is not None, "batch": batch})
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    builder = _SketchBuilder(model.backend, exact, hidden, vocab, path.with_suffix(".npy"), (rows, rows * batch))
    with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError):
        return builder.load(SketchBenchmark(**json.loads(path.read_text())["found"]))
    networks = engine.runner.networks
    handle = next((each for each in networks if isinstance(each.network, HeadNetwork | BlockNetwork)), None)
    if handle is None:
        return None
    text = TEXT_FILE.read_text(encoding="utf-8")
    tokens = [token for token in model.tokenizer.encode(text, add_special=True) if token < vocab]
    try:
        if (states := _states(engine, handle, tokens)) is None or len(states) < MIN_STATES:
            return None
        sketch, benchmark = builder.best(states, check_agreement=engine.synthetic is None)
    except np.linalg.LinAlgError:  # a broken head, which inspect and the server's log report
        return None
    hub.try_save_record(path, {"found": asdict(benchmark), "of": known})
    return sketch


def _states(engine: Engine, handle: NetworkHandle, tokens: Seq[int]) -> Buffer | None:
    """Hidden states [R, H] that the network's LM head reads over a text; None if the engine has no room for it."""
    from headstart.drafters.block import BlockNetwork

    block = handle.network.module.spec if isinstance(handle.network, BlockNetwork) else None
    if block:
        prompts = _pieces(engine, tokens, block)
    else:
        prompts = [tuple(tokens[: max(min(engine.max_length - 3, engine.scheduler.budget), 0)])]
    if not prompts or not prompts[0]:
        return None
    params = SamplingParams(max_tokens=MAX_PIECE_TOKENS if block else 2)  # no sequence ends before all are in the cache
    requests = [
        Request(request_id=f"vocabulary {i}", prompt_ids=each, params=params, seed=0, stop_ids=frozenset(), depth=0)
        for i, each in enumerate(prompts)
    ]
    sequences = [sequence for request in requests for sequence in engine.submit(request)]
    try:
        while engine.has_work and any(each.num_computed < len(each.request.prompt_ids) for each in sequences):
            engine.step(lambda deltas: None)
        if block:
            rows = _end_blocks(engine, handle, sequences, block)
        else:
            first = handle.network.first_position
            rows = [Rows(sequences[0], first, prompts[0][first:], 1)]
        return engine.runner.run(handle, STATES, rows)["states"]
    finally:
        for request in requests:
            engine.abort(request.request_id)
        engine.reset_stats()


def _pieces(engine: Engine, tokens: Seq[int], block: BlockSpec) -> list[tuple[int, ...]]:
    """Pieces of a text as prompts that run together; each is long enough for a block after twice as many tokens."""
    length = 3 * block.rows_for(block.block_size)
    max_pieces = len(engine.memory.pool.blocks) // -(-(length + MAX_PIECE_TOKENS) // engine.config.block_size)
    count = min(min(len(tokens), engine.scheduler.budget) // length, engine.config.max_num_seqs, max_pieces)
    if length + MAX_PIECE_TOKENS >= engine.max_length:
        return []
    return [tuple(tokens[i * length : (i + 1) * length]) for i in range(count)]


def _end_blocks(engine: Engine, handle: NetworkHandle, sequences: Seq[Sequence], block: BlockSpec) -> list[Rows]:
    """Blocks over the last tokens of prompts, after computing the features before them."""
    from headstart.drafters.block import FEATURES, block_rows

    size, prompts = block.rows_for(block.block_size), [each.request.prompt_ids for each in sequences]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.runner.run(handle, FEATURES, [Rows(sequence, 0, prompt[:-size], 0)])
    return [
        block_rows(block, sequence, len(prompt) - size, block.block_size, prompt[-size])
        for sequence, prompt in zip(sequences, prompts, strict=True)
    ]


@dataclass(frozen=True)
class _SketchBuilder:
    """Builds sketches of one LM head [vocab, hidden]."""

    backend: Backend
    exact: Linear
    hidden: int
    vocab: int
    path: Path  # file of the sketch's directions
    rows: tuple[int, int]  # rows of a pass for one sequence, and for a batch

    def load(self, benchmark: SketchBenchmark) -> SketchedLinear | None:
        """The stored sketch; None if the full LM head was better. Raises OSError or ValueError for a damaged file."""
        if not benchmark.count:
            return None
        project, spread = np.load(self.path, mmap_mode=None)
        if project.shape != (benchmark.dims, self.hidden) or spread.shape != project.shape:
            raise ValueError("directions of another size")
        return self._sketch(project, spread, benchmark.count)

    def best(self, states: Buffer, *, check_agreement: bool) -> tuple[SketchedLinear | None, SketchBenchmark]:
        """The cheapest sketch with MIN_AGREEMENT, fitted to states [R, H], and its benchmark; (None, benchmark of the
        full LM head) if no sketch pays. Without check_agreement (synthetic acceptance) any agreement is enough."""
        rows = np.arange(len(states), dtype=np.int32)
        is_held = rows >= len(rows) - len(rows) // HELD_OUT
        train, test = (self.backend.rows(states, rows[held]) for held in (~is_held, is_held))
        some = np.random.default_rng(0).permutation(self.vocab)[:SAMPLED_ROWS]
        project, spread = sketch_directions(self._rows(some), self.backend.numpy(train), CANDIDATES[-1][0])
        first, full_s = self._measure(self.exact, test)
        for dims, count in CANDIDATES:
            if dims >= self.hidden or count * REFINED >= self.vocab:
                break
            with contextlib.suppress(OSError):  # written first: packed weights are cached by the file they come from
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=self.path.parent, suffix=".tmp", delete=False) as file:
                    np.save(file, np.stack((project[:dims], spread[:dims])))
                Path(file.name).replace(self.path)
            sketch = self._sketch(project[:dims], spread[:dims], count)
            guess, seconds = self._measure(sketch, test)
            benchmark = SketchBenchmark(dims, count, float((guess == first).mean()))
            if seconds[0] > MAX_TIME_SHARE * full_s[0] or seconds[-1] > max(MAX_TIME_SHARE, 1) * full_s[-1]:
                break  # larger sketches cost more, and cost grows with rows unlike the full head's
            if benchmark.agreement >= MIN_AGREEMENT or not check_agreement:
                return sketch, benchmark
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        return None, SketchBenchmark(0, 0, 1.0)

    def _sketch(self, project: NDArray[np.float32], spread: NDArray[np.float32], count: int) -> SketchedLinear:
        with self.backend.reading([self.path]):
            narrow = _tensor("draft_sketch.project", project)
            scan = _Scan("draft_sketch.scan", (self.vocab, len(spread)), spread, self._rows)
            narrowed, scanned = self.backend.weight(narrow, precise=True), self.backend.weight(scan, drafts=True)
            return SketchedLinear(self.exact, narrowed, scanned, count)

    def _rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of the LM head [n, hidden]."""

        def code(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            return {"rows": ops.embed(self.exact.weight, step.token_ids)}

        handle = self.backend.prepare(code)
        return np.concatenate([
            self.backend.numpy(self.backend.run(handle, StepPlan.of_rows(part))["rows"]).copy() for part in _parts(ids)
        ])  # fmt: skip

    def _measure(self, lm_head: LMHead, states: Buffer) -> tuple[NDArray[np.int64], tuple[float, ...]]:
        """First choice for each state, and the fastest time for one row and for a batch."""

        def code(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            return {"logits": lm_head(ops, ops.take_rows(step.hidden, step.logit_rows))}

        handle, choices, seconds = self.backend.prepare(code, hidden_width=self.hidden), list[int](), []
        for begin in range(0, len(states), STATES_PER_PASS):
            part = np.arange(begin, min(begin + STATES_PER_PASS, len(states)), dtype=np.int32)
            logits = self.backend.run(handle, StepPlan.of_rows(part), hidden=self.backend.rows(states, part))["logits"]
            choices += self.backend.numpy(logits).argmax(1).tolist()
        for count in self.rows:
            part = np.arange(count, dtype=np.int32) % len(states)
            inputs, plan, times = self.backend.rows(states, part), StepPlan.of_rows(part), list[float]()
            for _ in range(TIMED_RUNS):
                start_s = time.perf_counter()
                self.backend.run(handle, plan, hidden=inputs)
                times.append(time.perf_counter() - start_s)
            seconds.append(min(times))
        return np.array(choices), tuple(seconds)


@dataclass(frozen=True, eq=False)
class _Scan(Deferred):
    """Lazily computed tensor [vocab, dims]: B w of a sketch (layers/linear.py), B = `spread`, w = LM head row."""

    name: str
    shape: tuple[int, ...]
    spread: NDArray[np.float32]  # [dims, hidden]
    rows: Callable[[NDArray[np.int64]], NDArray[np.float32]]  # ids [n] -> LM head rows [n, hidden]
    dtype: str = "F32"

    def fingerprint(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self.spread).data)

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        return _tensor(self.name, np.concatenate([self.rows(part) @ self.spread.T for part in _parts(rows)]))


def _tensor(name: str, values: NDArray[np.float32]) -> Tensor:
    return make_tensor(name, values.shape, "F32", np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1))


def _parts(ids: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, len(ids), ROWS_PER_PASS):
        yield ids[begin : begin + ROWS_PER_PASS]
