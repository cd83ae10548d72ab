"""Recorded programs, samples and whole drafts of the cuda backend, on a device whose graphs rerun their work. Tokens
and drafts must equal those of `reference`, which works step by step."""

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


def drafts_of(engine: Engine, max_tokens: int = 4, params_of_requests: Iterable[dict[str, Any]] = MIXED) -> list[Any]:
    """Tokens and draft of every running sequence after every step."""
    seen: list[Any] = []
    for i, fields in enumerate(params_of_requests):
        engine.submit(support.request(support.prompt_of(2 + 3 * i, i), name=str(i), max_tokens=max_tokens, **fields))
    while engine.has_work:
        engine.step(lambda deltas: None)
        seen.append([(s.order, list(s.tokens), list(s.draft.tokens)) for s in engine.scheduler.running])
    return seen


@pytest.mark.parametrize("head", HEADS)
def test_whole_drafts_equal_stepwise_drafts(head: str) -> None:
    """Covers one module reused with a draft vocabulary, two modules in a cycle, a chain of modules, a block with
    confidence, and a block in one pass; the host edits logits for penalties in most of them."""
    found, depth = [], 3 if head == "mtp, two modules" else 2
    params_of_requests = [LIMITED] if head in ("mtp, two modules", "dflash") else MIXED
    for backend in ("reference", "cuda"):
        model = model_of(backend=backend)
        device_graphs = HEADS[head](model)
        engine = engine_of(replace(model, head=device_graphs), drafter=device_graphs.spec.kind, depth=depth)
        found.append(drafts_of(engine, depth + 2, params_of_requests))
    assert found[0] == found[1] and any(len(draft) == depth for step in found[1] for _, _, draft in step)


@dataclass
class ReplayingGraphs:
    """Makes devices whose recordings rerun the interpreter's work into the same buffers."""

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
def recording_on(model: Model, device: Any) -> Iterator[None]:
    recorder: Any = model.backend.recorder
    known, recorder.device = recorder.device, device
    try:
        yield
    finally:
        recorder.device = known


def with_head(backend: str) -> Model:
    model = model_of("qwen3_5", backend)
    return replace(model, head=support.make_head(model))


def test_recordings_are_reused_for_plans_of_equal_shape() -> None:
    """Recurrent states and sampling are part of the recordings; most passes have an earlier shape."""
    model, device_graphs = with_head("cuda"), ReplayingGraphs()
    with recording_on(model, device_graphs.device()):
        engine = engine_of(model, depth=1)
        found = drafts_of(engine, 6, [LIMITED])
    assert found == drafts_of(engine_of(with_head("reference"), depth=1), 6, [LIMITED])
    engine.memory.pool.check()
    trunk = [each for handle in engine.runner.trunk.programs.values() for each in handle.recordings.values()]
    assert len(trunk) > 1 and all(each.sampling for each in trunk), "sampling is not recorded"
    assert device_graphs.replayed >= 2 * device_graphs.recorded


def test_growing_tables_are_recorded_again() -> None:
    model, device_graphs = model_of(), ReplayingGraphs()
    with recording_on(model, device_graphs.device()):
        engine = engine_of(model, drafter="none")
        support.run(engine, [support.request([3, 4, 5], max_tokens=3)])
        before = device_graphs.recorded
        model.backend.recorder.tables.cover(5000)
        support.run(engine, [support.request([3, 4, 6], max_tokens=3)])
    assert device_graphs.recorded == 2 * before


def test_out_of_device_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_out_of_memory(*shape: Any, **about: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = model_of()
    monkeypatch.setattr(torch, "zeros", raise_out_of_memory)
    monkeypatch.setattr(model.backend, "torch_device", torch.device("cuda"))
    with pytest.raises(ModelError, match="the GPU has no memory left for keys, values and states") as raised:
        engine_of(model, drafter="none")
    assert "--kv-blocks" in str(raised.value.hint)


def test_kv_blocks_fit_the_free_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV blocks use 80 % of the free memory, for keys and values of all networks and hidden states."""
    from headstart.engine import build as building

    model, free = model_of(), 200_000
    monkeypatch.setattr(type(model.backend), "free_memory", lambda self: free)
    monkeypatch.setattr(type(model.backend), "runs_on", "cuda")
    monkeypatch.setattr(building, "PLANNED", building.WeakKeyDictionary())
    engine = engine_of(model, kv_blocks=None, max_num_seqs=64, drafter="none", max_model_len=64)
    per_token = sum(model.backend.kv_bytes(spec) for spec in model.decoder.kv_specs)
    blocks = len(engine.memory.pool.blocks)
    assert blocks == int(0.8 * free) // (8 * per_token) and blocks < 64 * 64 // 8
