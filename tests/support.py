"""Tiny models, heads, requests, engine runs and comparisons, shared by tests."""

import atexit
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import as_tensors
from family_rows import row_of
from tiny_models import write_model

from headstart import registry
from headstart.config import MAX_DEPTH, EngineConfig
from headstart.core import (
    Constraint,
    Delta,
    Draft,
    DraftStats,
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
    Span,
    StepPlan,
    TokenLogprob,
)
from headstart.drafters.base import Drafter, DraftRequest
from headstart.engine.build import build_engine
from headstart.engine.engine import Engine
from headstart.engine.load import Model, load_draft_model, load_model
from headstart.formats import open_checkpoint
from headstart.formats.safetensors import save
from headstart.heads import eagle3, files
from headstart.heads.base import BlockSpec, Head, HeadSpec
from headstart.heads.draft_model import DraftModel
from headstart.heads.kind import HeadCheckpoint, head_kind
from headstart.kernels.ops import AttentionSpec, Backend, RopeSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.linear import Linear
from headstart.layers.mlp import MLPConfig
from headstart.layers.weights import Weights
from headstart.models.base import Family
from headstart.models.small import Arrays, random_arrays

ALL_FAMILIES = registry.available("models")
RELATIVES = [name for name in ALL_FAMILIES if row_of(name).is_relative]
"""Layers of other families with declared differences: tests/contract/test_relatives.py has those, and no grid of its
own."""
FAMILIES = [name for name in ALL_FAMILIES if name not in RELATIVES]
DRAFTERS = sorted({*registry.available("drafters"), *registry.available("heads")} - {"head", "assistant", "eagle"})
"""Without assistants, which need a specific trunk, and EAGLE, which drafts as MTP: tests/drafters and tests/heads."""
VOCAB, EOS = 131, 2
PLAIN_SPEC = HeadSpec()
SMALL = {"backend": "reference", "threads": 1, "block_size": 8, "kv_blocks": 80, "max_model_len": 128}
"""Engine settings of most tests; 16 blocks hold one sequence of 128 tokens, so `kv_blocks=16` forces preemption."""

KEPT_MODELS = 32
"""Number of recent models that stay loaded. Each keeps a file open."""

_temporary = tempfile.TemporaryDirectory(prefix="headstart-tests-")
atexit.register(_temporary.cleanup)
_serial = count()


PATIENCE = 300.0
"""Seconds after which a test gives up; generous, for loaded machines."""


def until(condition: Callable[[], Any], describe: Callable[[], Any] = lambda: "") -> Any:
    """Waits until the condition is true; returns its value. `describe` gives the message after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, describe()
        time.sleep(0.01)
    return found


def in_threads(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Results of work(item) in concurrent threads, one per item. Raises the first exception."""
    with ThreadPoolExecutor(32) as threads:
        return [future.result(PATIENCE) for future in [threads.submit(work, item) for item in items]]


# Models and heads.


def family_of(name: str) -> Family:
    return registry.find("models", name).FAMILY


def new_folder() -> Path:
    return Path(_temporary.name) / str(next(_serial))


def soften(arrays: Arrays, factor: float) -> Arrays:
    """Scales the outputs of all blocks: with a small factor the next token depends mostly on the last one, and a head
    can predict it."""
    quiet = (
        "o_proj.weight", "wo_b.weight", "o_b_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight",
        "experts.down_proj", "down_proj_bias",
    )  # fmt: skip
    return {name: array * np.float32(factor if name.endswith(quiet) else 1) for name, array in arrays.items()}


def model_at(path: Path, backend: str = "reference", dtype: str = "float32", **settings: Any) -> Model:
    return load_model(str(path), EngineConfig(backend=backend, dtype=dtype, threads=1, **settings))


@lru_cache(maxsize=KEPT_MODELS)
def tiny_model(family: str, dtype: str = "float64", softness: float = 1.0, **changes: Any) -> Model:
    """The family's tiny model, read back from disk. Recent models stay loaded."""
    config, arrays = family_of(family).tiny(**changes)
    return model_at(write_model(new_folder(), config, soften(arrays, softness)), dtype=dtype)


def head_of(
    model: Model, spec: HeadSpec, arrays: Arrays, draft_ids: Seq[int] | None = None, backend: Backend | None = None
) -> Head:
    """A head with the given tensors for a trunk."""
    kind, hidden = head_kind(spec.kind), model.config.hidden_size
    weights = Weights(as_tensors(arrays), backend or model.backend, "made head")
    ids = None if draft_ids is None else np.array(sorted(draft_ids), np.int64)
    rows = model.config.vocab_size if ids is None else len(ids)
    has_one = weights.has("lm_head.weight")
    lm_head = Linear(weights.get("lm_head.weight", rows, hidden)) if has_one else None
    raw = weights.raw("lm_head.weight", (rows, hidden)) if has_one else None
    spec = kind.fit(spec, model.config)
    return Head(spec, kind.modules(weights, spec, hidden), "made", ids, lm_head, lm_rows=raw)


def make_head(
    model: Model,
    spec: HeadSpec = PLAIN_SPEC,
    *,
    agreeing: bool = False,
    draft_ids: Seq[int] | None = None,
    seed: int = 1,
) -> Head:
    """An MTP head for any trunk: random, or `agreeing` with a softened trunk."""
    spec = replace(spec, layer=model.config.head_layer)
    return head_of(model, spec, mtp_arrays(model, spec, agreeing, seed), draft_ids)


def mtp_arrays(model: Model, spec: HeadSpec, agreeing: bool, seed: int = 1) -> Arrays:
    hidden, one, arrays = model.config.hidden_size, replace(spec, num_modules=1), dict[str, Any]()
    for i in range(spec.num_modules):
        module = random_arrays(head_kind("mtp").shapes(one, hidden), seed + i)
        arrays |= {name.replace("mtp.0.", f"mtp.{i}."): array for name, array in module.items()}
        if agreeing:
            arrays = soften(arrays, 0.1)
            halves = [np.eye(hidden), np.zeros((hidden, hidden))]
            arrays[f"mtp.{i}.projection.weight"] = np.hstack(halves[::-1] if spec.hidden_first else halves)
            arrays[f"mtp.{i}.norm_embedding.weight"] = np.ones(hidden)
            arrays[f"mtp.{i}.norm.weight"] = model.weights.raw("norm.weight", (hidden,)).float32()
    return arrays


def plain_layer(config: DecoderConfig) -> LayerConfig:
    """A Llama block, with the trunk's attention shape if the trunk has grouped attention."""
    mixer = config.head_layer.mixer
    spec, rope = AttentionSpec(2, 1, 8, 8**-0.5), RopeSpec((1.0, 0.1, 0.01, 0.001), 8)
    if isinstance(mixer, AttentionConfig) and mixer.rope:
        spec, rope = replace(mixer.spec, window=0, value_dim=0, chunk=0), mixer.rope
    inner = MLPConfig(inner=config.head_layer.mlp.inner)
    return LayerConfig(mixer=AttentionConfig(spec=spec, rope=rope), mlp=inner, eps=config.eps)


def eagle3_spec(model: Model, tap: tuple[int, ...] = (0, 1, 2)) -> HeadSpec:
    return HeadSpec(kind="eagle3", layer=plain_layer(model.config), tap=tap, recycle="pre_norm")


def eagle3_arrays(model: Model, spec: HeadSpec, draft_ids: Seq[int] | None = None, seed: int = 1) -> Arrays:
    """A random EAGLE-3 head under canonical names; norms near 1."""
    hidden = model.config.hidden_size
    size = len(draft_ids) if draft_ids is not None else model.config.vocab_size
    return random_arrays({**head_kind("eagle3").shapes(spec, hidden), "lm_head.weight": (size, hidden)}, seed)


def make_eagle3(model: Model, tap: tuple[int, ...] = (0, 1), draft_ids: Seq[int] | None = None) -> Head:
    """A random EAGLE-3 head for any trunk of two layers or more."""
    spec = eagle3_spec(model, tap)
    return head_of(model, spec, eagle3_arrays(model, spec, draft_ids), draft_ids)


def peagle_spec(model: Model, tap: tuple[int, ...] = (0, 1, 2)) -> HeadSpec:
    """A P-EAGLE spec with two layers; the mask token is in no text."""
    block = BlockSpec(block_size=8, num_layers=2, mask_token_id=1, causal=True, anchor_predicts=True)
    return replace(eagle3_spec(model, tap), kind="peagle", num_layers=2, block=block)


def block_spec(model: Model, tap: tuple[int, ...] = (0, 1), **facts: Any) -> HeadSpec:
    """A small block drafter's spec. `facts` are fields of BlockSpec; `qk_norm` is a field of the layer."""
    layer = plain_layer(model.config)
    if facts.pop("qk_norm", False):
        layer = replace(layer, mixer=replace(layer.mixer, qk_norm=True))
    given = {"block_size": 5, "num_layers": 2, "mask_token_id": 1, "causal": True, "anchor_predicts": True} | facts
    return HeadSpec(kind="block", layer=layer, tap=tap, block=BlockSpec(**given))


def sized(spec: HeadSpec, vocab_size: int, draft_ids: Seq[int] | None = None) -> HeadSpec:
    """The spec with the vocabulary sizes of its Markov head."""
    assert spec.block
    num_draft = vocab_size if draft_ids is None else len(draft_ids)
    return replace(spec, block=replace(spec.block, vocab_size=vocab_size, draft_vocab_size=num_draft))


def block_arrays(
    model: Model, spec: HeadSpec, draft_ids: Seq[int] | None = None, own: Seq[str] = (), seed: int = 1
) -> Arrays:
    """A random block drafter under canonical names; `own`: its own lm_head or embed_tokens."""
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    shapes = head_kind("block").shapes(sized(spec, vocab, draft_ids), hidden)
    rows = {"lm_head": vocab if draft_ids is None else len(draft_ids), "embed_tokens": vocab}
    return random_arrays(shapes | {f"{name}.weight": (rows[name], hidden) for name in own}, seed)


def make_block(model: Model, draft_ids: Seq[int] | None = None, **facts: Any) -> Head:
    """A random block drafter for any trunk of two layers or more."""
    spec = sized(block_spec(model, **facts), model.config.vocab_size, draft_ids)
    return head_of(model, spec, block_arrays(model, spec, draft_ids), draft_ids)


def write_head(
    path: Path, config: DecoderConfig, spec: HeadSpec, arrays: Mapping[str, Any], draft_ids: Any = None
) -> Path:
    """Writes a head's directory for a trunk's config; EAGLE-3 heads in their published layout."""
    ids = None if draft_ids is None else np.array(draft_ids, np.int64)
    head = HeadCheckpoint(
        spec=spec, hidden_size=config.hidden_size, vocab_size=config.vocab_size, draft_token_ids=ids, trunk="x"
    )  # fmt: skip
    if spec.kind in ("eagle3", "peagle"):
        write_published(path, head, arrays)
    else:
        files.write_head(path, head, arrays)
    return path


def write_published(path: Path, head: HeadCheckpoint, arrays: Mapping[str, Any]) -> None:
    """Writes an EAGLE-3 head's directory in the published layout."""
    document, named = eagle3.published(head, arrays, 8192)
    path.mkdir(parents=True)
    save(path / "model.safetensors", named)
    (path / "config.json").write_text(json.dumps(document), "utf-8")


def make_medusa(model: Model, heads: int = MAX_DEPTH) -> Head:
    """Random Medusa heads, one per draft position."""
    spec = HeadSpec(kind="medusa", num_modules=heads)
    return head_of(model, spec, random_arrays(head_kind("medusa").shapes(spec, model.config.hidden_size)))


def make_draft_model(model: Model, family: str = "qwen3") -> DraftModel:
    """A tiny random draft model of a family for any trunk."""
    written = write_model(new_folder(), *family_of(family).tiny(num_hidden_layers=1))
    return load_draft_model(model, open_checkpoint(written))


@lru_cache(maxsize=KEPT_MODELS)
def headed_model(family: str, kind: str = "mtp") -> Model:
    """The tiny model with a head of a kind; for `mtp` its own head if it has one, else a random one."""
    model = tiny_model(family, num_hidden_layers=2)
    if kind == "eagle3":
        return replace(model, head=make_eagle3(model))
    if kind == "medusa":
        return replace(model, head=make_medusa(model))
    if kind == "peagle":
        spec = peagle_spec(model, (0, 1))
        return replace(model, head=head_of(model, spec, eagle3_arrays(model, spec)))
    if kind == "block":
        return replace(model, head=make_block(model, markov_rank=8, confidence=True))
    if kind == "draft_model":
        return replace(model, head=make_draft_model(model))
    return model if model.head else replace(model, head=make_head(model))


@lru_cache(maxsize=KEPT_MODELS)
def agreeing_model(family: str) -> Model:
    """A softened trunk with a head of high acceptance."""
    model = tiny_model(family, softness=0.1, num_hidden_layers=2)
    return replace(model, head=make_head(model, agreeing=True))


def make(model: Model, **settings: Any) -> Engine:
    """An engine over a model; settings are EngineConfig fields over `SMALL`."""
    return build_engine(model, EngineConfig(**{**SMALL, "dtype": "float64", **settings}))


# Requests.


def request(
    prompt: Iterable[int], *, name: str = "r", seed: int = 0, depth: int | None = None, stops: Iterable[int] = (EOS,),
    constraint: Constraint | None = None, **params: Any,
) -> Request:  # fmt: skip
    """A request as LLM.request builds it: stop ids are banned until min_tokens are generated."""
    chosen = SamplingParams(**params)
    stop_ids = frozenset(stops) | frozenset(chosen.stop_token_ids)
    return Request(
        request_id=name, prompt_ids=tuple(int(token) for token in prompt), params=chosen, seed=seed, stop_ids=stop_ids,
        banned_until_min=stop_ids if chosen.min_tokens else frozenset(), depth=depth, constraint=constraint,
    )  # fmt: skip


def new_sequence(engine: Engine, tokens: Seq[int], known: int | None = None, computed: int = 0) -> Sequence:
    """A sequence with blocks for `tokens` and a draft. The first `known` tokens are committed; the trunk has computed
    the first `computed`."""
    sequence = Sequence(request(tokens[:1]), 0, list(tokens[:known]), 0)
    assert engine.memory.reserve(sequence, len(tokens) + 8)
    if computed:
        engine.runner.forward([Span(sequence, 0, computed, 0)])
    sequence.num_computed = computed
    return sequence


def plan_at(start: int, tokens: Seq[int], visible_end: int | None = None, first_position: int = 0) -> StepPlan:
    """Rows of one sequence at slots and positions from `start`."""
    ints = lambda values: np.asarray(values, np.int32)  # noqa: E731
    positions = ints(range(start, start + len(tokens)))
    return StepPlan(
        token_ids=ints(tokens), positions=positions, slots=positions, row_starts=ints([0, len(tokens)]),
        block_tables=ints([[0, 1, 2, 3]]), logit_rows=ints(range(len(tokens))), block_size=8,
        first_position=first_position,
        visible_end=None if visible_end is None else ints([visible_end] * len(tokens)),
    )  # fmt: skip


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


VARIETY: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 20, "repetition_penalty": 1.3, "n": 2},
    {"top_p": 0.9, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"min_p": 0.05, "logit_bias": {5: 4.0, 9: -100.0}, "logprobs": 3},
    {"min_tokens": 8, "stop_token_ids": tuple(range(3, 40)), "logprobs": 0},
    {"top_p": 0.8, "top_k": 40, "n": 2, "logprobs": 2},
    {"stop_token_ids": tuple(range(100, 120)), "repetition_penalty": 0.8},
    {"prompt_logprobs": 2, "max_tokens": 6},
)
"""One request each: every sampling parameter, alone and together."""


def varied_requests(temperature: float, max_tokens: int = 14, shared: int = 20) -> list[Request]:
    """A request for each entry of VARIETY. Prompts have 1 to 60 tokens; some share a prefix."""
    common = prompt_of(shared, 99)
    lengths = (1, 7, 30, 12, 40, 3, 25, 18)
    requests = []
    for i, (extra, length) in enumerate(zip(VARIETY, lengths, strict=True)):
        prompt = ([] if i in (0, 5) else common) + prompt_of(length, i)
        params = {"temperature": temperature, "max_tokens": max_tokens, **extra}
        requests.append(request(prompt, name=f"r{i}", seed=1000 + i, **params))
    return requests


# Runs.


@dataclass
class Output:
    """Collected output of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: DraftStats | None = None
    error: str = ""


Outputs = dict[tuple[str, int], Output]


def collect(outputs: Outputs, deltas: list[Delta]) -> None:
    for delta in deltas:
        output = outputs.setdefault((delta.request_id, delta.choice), Output())
        assert output.finish_reason is None, "a delta after the end"
        output.tokens += delta.tokens
        output.logprobs += delta.logprobs
        output.prompt_logprobs += delta.prompt_logprobs
        output.finish_reason, output.stats, output.error = delta.finish_reason, delta.stats, delta.error


def run(engine: Engine, requests: Iterable[Request], after_step: Callable[[Engine], None] | None = None) -> Outputs:
    """Runs all requests to the end and checks that the engine is clean."""
    outputs: Outputs = {}
    for each in requests:
        engine.submit(each)
    for _ in range(10_000):
        if not engine.has_work:
            break
        engine.step(lambda deltas: collect(outputs, deltas))
        if after_step:
            after_step(engine)
    assert_clean(engine)
    return outputs


def assert_clean(engine: Engine) -> None:
    """Checks that no work, block, sequence or state is left."""
    assert not engine.has_work
    assert not engine._live
    assert not engine.memory._keys
    if engine.memory.spill:
        engine.memory.spill.flush()
        assert not engine.memory.collect()
    engine.memory.pool.check()
    assert engine.memory.pool.num_free == len(engine.memory.pool.blocks)
    if engine.memory.states:
        engine.memory.states.check()
        assert not engine.memory.states._states


def assert_same(found: Outputs, expected: Outputs) -> None:
    """Compares tokens, finish reasons and logprobs. Logprobs may differ in the last float32 bit, as batches differ."""
    assert found.keys() == expected.keys()
    for key, want in expected.items():
        have = found[key]
        assert have.tokens == want.tokens, key
        assert (have.finish_reason, have.error) == (want.finish_reason, want.error), key
        for ours, theirs in ((have.logprobs, want.logprobs), (have.prompt_logprobs, want.prompt_logprobs)):
            assert_same_logprobs(ours, theirs)


def assert_same_logprobs(found: Seq[TokenLogprob | None], expected: Seq[TokenLogprob | None]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        assert (ours.token, [t for t, _ in ours.top]) == (theirs.token, [t for t, _ in theirs.top])
        values = [[each.logprob, *(v for _, v in each.top)] for each in (ours, theirs)]
        np.testing.assert_allclose(values[0], values[1], rtol=2e-7, atol=1e-9)


# Drafters for tests and recorders.


class OracleDrafter(Drafter):
    """Proposes the true continuation with random errors, of random length, or nothing."""

    method = "oracle"

    def __init__(self, truth: Outputs, seed: int, error: float) -> None:
        self._truth, self._error = truth, error
        self._rng = np.random.default_rng(seed)
        self.proposed = self.released = 0

    def propose(self, requests: Seq[DraftRequest]) -> None:
        for sequence, depth in [(request.sequence, request.depth) for request in requests]:
            if self._rng.random() < 0.15:
                continue
            done = sequence.num_output
            right = self._truth[sequence.request.request_id, sequence.choice].tokens[done : done + depth]
            tokens = right + self._rng.integers(0, VOCAB, depth - len(right)).tolist()
            tokens = [int(self._rng.integers(VOCAB)) if self._rng.random() < self._error else t for t in tokens]
            sequence.draft = Draft(tokens[: int(self._rng.integers(0, depth + 1))], method=self.method)
            self.proposed += len(sequence.draft.tokens)

    def release(self, sequence: Sequence) -> None:
        self.released += 1


def record_passes(engine: Any) -> list[tuple[str, int]]:
    """A list that gets (program, number of rows) of each later pass."""
    passes: list[tuple[str, int]] = []
    original = engine.runner.run

    def run(handle: Any, program: str, rows: Any, **more: Any) -> Any:
        passes.append((program, sum(len(part.token_ids) for part in rows)))
        return original(handle, program, rows, **more)

    engine.runner.run = run
    return passes


def record_drafts(engine: Any) -> list[tuple[list[int], list[int]]]:
    """A list that gets (committed tokens, drafted tokens) of each later draft."""
    drafts: list[tuple[list[int], list[int]]] = []
    propose = engine.drafting.drafter.propose

    def recorded(requests: Any) -> None:
        propose(requests)
        drafts.extend((list(each.sequence.tokens), list(each.sequence.draft.tokens)) for each in requests)

    engine.drafting.drafter.propose = recorded
    return drafts
