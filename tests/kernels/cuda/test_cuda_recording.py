"""Recorded programs, draws and whole drafts of the cuda backend, on a device whose graphs run their work again. What
must come out are the tokens and drafts of `reference`, which makes them step by step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import support
import torch
from tiny_models import write_model

from headstart.config import EngineConfig
from headstart.engine.build import build_engine
from headstart.engine.engine import Engine
from headstart.engine.load import Model, load_model
from headstart.errors import ModelError
from headstart.heads.base import Head, HeadSpec

pytestmark = pytest.mark.slow
DRAFT_IDS = tuple(range(1, support.VOCAB, 3))
LIMITED: dict[str, Any] = {"temperature": 1.2, "top_p": 0.7, "top_k": 20}
MIXED = {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.3}, LIMITED
"""Of two sequences, one with penalties: they are edited by the host."""
HEADS: dict[str, Callable[[Model], Head]] = {
    "mtp, draft vocabulary": lambda model: support.make_head(model, draft_ids=DRAFT_IDS),
    "mtp, two modules": lambda model: support.make_head(
        model, HeadSpec(num_modules=2, beyond="cycle", recycle="pre_norm")
    ),
    "mtp, a chain": lambda model: support.make_head(model, HeadSpec(num_modules=3, chained=True)),
    "dspark": lambda model: support.make_block(
        model, draft_ids=DRAFT_IDS, tap=(0,), num_layers=1, markov_rank=8, confidence=True
    ),
    "dflash": lambda model: support.make_block(
        model, tap=(0,), num_layers=1, block_size=4, causal=False, anchor_predicts=False
    ),
}


@cache
def model_of(family: str = "mimo", backend: Any = "cuda") -> Model:
    changes = {"layer_types": ["linear_attention"]} if family == "qwen3_5" else {}
    config, arrays = support.family_of(family).tiny(num_hidden_layers=1, **changes)
    path = write_model(support.new_folder(), config, support.soften(arrays, 0.1))
    kept = "float32" if backend == "cuda" else None
    return load_model(str(path), EngineConfig(backend=backend, kv_cache_dtype=kept))


def engine_of(model: Model, **settings: Any) -> Engine:
    kept = "float32" if model.backend.name == "cuda" else None
    wanted = {**support.SMALL, "backend": model.backend.name, "kv_cache_dtype": kept, "depth": 2, **settings}
    return build_engine(model, EngineConfig(**wanted))


def drafts_of(engine: Engine, max_tokens: int = 4, asked: Iterable[dict[str, Any]] = MIXED) -> list[Any]:
    """Tokens and draft of every sequence after every step."""
    seen: list[Any] = []
    for i, fields in enumerate(asked):
        engine.submit(support.request(support.prompt_of(2 + 3 * i, i), name=str(i), max_tokens=max_tokens, **fields))
    while engine.has_work:
        engine.step(lambda deltas: None)
        seen.append([(s.order, list(s.tokens), list(s.draft.tokens)) for s in engine.scheduler.running])
    return seen


@pytest.mark.parametrize("head", HEADS)
def test_whole_drafts_are_those_of_single_steps(head: str) -> None:
    """A head again and again, over a part of the vocabulary; one module after the other, and the first again; modules
    over the outputs of the one before; a block
    in turn, with a confidence; a block at once. The host's edits in two of them."""
    found, depth = [], 3 if head == "mtp, two modules" else 2
    asked = [LIMITED] if head in ("mtp, two modules", "dflash") else MIXED
    for backend in ("reference", "cuda"):
        model = model_of(backend=backend)
        made = HEADS[head](model)
        engine = engine_of(replace(model, head=made), drafter=made.spec.kind, depth=depth)
        found.append(drafts_of(engine, depth + 2, asked))
    assert found[0] == found[1] and any(len(draft) == depth for step in found[1] for _, _, draft in step)


@dataclass
class Replaying:
    """Makes a device of the interpreter's record work: a recording runs it again, into the same places."""

    recorded: int = 0
    replayed: int = 0

    def device(self) -> Any:
        from headstart.kernels.cuda.device import CudaDevice, open_device

        counts = self

        class Graphs(CudaDevice):
            def record(self, work: Any) -> Any:
                counts.recorded += 1
                kept = work()

                def replay() -> None:
                    counts.replayed += 1
                    for name, x in work().items():
                        kept[name].copy_(x)

                return kept, replay

        own = open_device()
        return Graphs(own.torch_device, own.columns, own.elements, own.wide, graphs=True)


@contextmanager
def recorded(model: Model, device: Any) -> Iterator[None]:
    recorder: Any = model.backend.recorder
    known, recorder.device = recorder.device, device
    try:
        yield
    finally:
        recorder.device = known


def with_head(backend: str) -> Model:
    model = model_of("qwen3_5", backend)
    return replace(model, head=support.make_head(model))


def test_recordings_serve_all_plans_of_a_shape() -> None:
    """Recurrent states and draws included; most passes have the shape of one before."""
    model, made = with_head("cuda"), Replaying()
    with recorded(model, made.device()):
        engine = engine_of(model, depth=1)
        found = drafts_of(engine, 6, [LIMITED])
    assert found == drafts_of(engine_of(with_head("reference"), depth=1), 6, [LIMITED])
    engine.memory.pool.check()
    trunk = [each for handle in engine.runner.trunk.programs.values() for each in handle.recordings.values()]
    assert len(trunk) > 1 and all(each.sampling for each in trunk), "what is drawn is recorded, too"
    assert made.replayed >= 2 * made.recorded


def test_tables_that_grow_are_recorded_anew() -> None:
    model, made = model_of(), Replaying()
    with recorded(model, made.device()):
        engine = engine_of(model, drafter="none")
        support.run(engine, [support.request([3, 4, 5], max_tokens=3)])
        before = made.recorded
        model.backend.recorder.tables.cover(5000)
        support.run(engine, [support.request([3, 4, 6], max_tokens=3)])
    assert made.recorded == 2 * before


def test_memory_that_runs_out_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device, of which torch says so."""

    def full(*shape: Any, **about: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = model_of()
    monkeypatch.setattr(torch, "zeros", full)
    monkeypatch.setattr(model.backend, "torch_device", torch.device("cuda"))
    with pytest.raises(ModelError, match="the GPU has no memory left for keys, values and states") as raised:
        engine_of(model, drafter="none")
    assert "--kv-blocks" in str(raised.value.hint)


def test_blocks_fit_the_free_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 % of it, for keys and values of all networks and hidden states."""
    from headstart.engine import build as building

    model, free = model_of(), 200_000
    monkeypatch.setattr(type(model.backend), "free_memory", lambda self: free)
    monkeypatch.setattr(type(model.backend), "runs_on", "cuda")
    monkeypatch.setattr(building, "PLANNED", building.WeakKeyDictionary())
    engine = engine_of(model, kv_blocks=None, max_num_seqs=64, drafter="none", max_model_len=64)
    per_token = sum(model.backend.kv_bytes(spec) for spec in model.decoder.kv_specs)
    blocks = len(engine.memory.pool.blocks)
    assert blocks == int(0.8 * free) // (8 * per_token) and blocks < 64 * 64 // 8
