"""Engines as they are made: what their pools take of the memory, and values of flags without sense."""

import gc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support import SMALL, VOCAB, headed_model, new_folder, tiny_model
from tiny_models import write_tiny

from headstart import machine
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import Draft, SamplingParams
from headstart.engine import build as make
from headstart.engine.build import MEMORY_SHARE
from headstart.errors import HeadstartError, UsageError
from headstart.kernels.backends import native
from headstart.kernels.backends.native import limits

AUTO_SIZED: dict[str, Any] = {**SMALL, "dtype": "float64", "kv_blocks": None, "max_num_seqs": 50_000, "depth": 3}


def bytes_of(llm: LLM) -> int:
    """Of its pools, as the backend has them."""
    runner = llm.engine.runner
    pools: list[Any] = [runner.trunk.pools.hidden]
    for handle in (runner.trunk, *runner.networks):
        pools += [*handle.pools.kv, *handle.pools.states]
    return sum(each.nbytes for pool in pools if pool is not None for each in arrays_of(pool))


def arrays_of(pool: Any) -> list[Any]:
    if hasattr(pool, "nbytes"):
        return [pool]
    parts = pool if isinstance(pool, (list, tuple)) else vars(pool).values()
    return [each for part in parts if part is not None and not isinstance(part, int) for each in arrays_of(part)]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    gc.collect()
    monkeypatch.setattr(make, "PLANNED", type(make.PLANNED)())
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(1 << 40, 64 << 20, 128 << 20))
    return 64 << 20


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_all_pools_are_within_the_budget(kind: str, free: int) -> None:
    """EAGLE-3 keeps the hidden states of several layers, a head of its own has keys and values: all of it counts."""
    llm = LLM(headed_model("llama", kind), EngineConfig(**AUTO_SIZED))
    assert llm.method == kind
    budget = free * MEMORY_SHARE["cpu"]
    assert 0.9 * budget < bytes_of(llm) <= budget


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_gpu_memory_utilization_sizes_the_cache(share: float, free: int) -> None:
    """Of 128 MB half is taken already."""
    llm = LLM(tiny_model("llama"), EngineConfig(**AUTO_SIZED, gpu_memory_utilization=share))
    budget = (128 << 20) * share - free
    assert 0.9 * budget < bytes_of(llm) <= budget


def test_engines_of_one_process_share_the_memory(free: int) -> None:
    """What others have planned with is theirs, though they have not filled it yet; it is free again when they go."""
    model, config = tiny_model("llama"), EngineConfig(**AUTO_SIZED)
    llms = [LLM(model, config) for _ in range(5)]
    sizes = [bytes_of(llm) for llm in llms]
    assert sum(sizes) < free
    for one, following in pairwise(sizes):
        assert following == pytest.approx((1 - MEMORY_SHARE["cpu"]) * one, rel=0.02)
    del llms
    gc.collect()
    assert bytes_of(LLM(model, config)) == sizes[0]


def test_a_full_memory_leaves_room_for_one_sequence(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"--kv-blocks 9999999 take \d+\.\d GB, but there are 0\.1 GB") as error:
        LLM(tiny_model("llama"), EngineConfig(**{**AUTO_SIZED, "kv_blocks": 9_999_999}))
    assert "blocks take 25% of what is free" in error.value.hint
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(1 << 40, 0, None))
    llm = LLM(tiny_model("llama"), EngineConfig(**AUTO_SIZED))
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=100, ignore_eos=True))[0].token_ids) == 100


FLAGS = (
    "threads", "max_model_len", "max_num_seqs", "block_size", "kv_blocks", "ngram_min", "ngram_max",
    "max_num_batched_tokens", "seed", "depth",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_works_or_is_refused_by_name(flag: str, free: int) -> None:
    backend = "native" if limits(EngineConfig()) is None else "reference"
    base: dict[str, Any] = {"backend": backend, "threads": 1, "depth": 2, "drafter": "mtp"}
    folder, name = str(write_tiny("mimo", new_folder())), "--" + flag.replace("_", "-")
    for value in (-1, 0, 1, 2, 3, 16, 10**5, 10**9, 2**63, 2**70, 1.5, "3", True):
        if flag == "max_num_seqs" and value not in (1, 16, 2**70):
            continue
        try:
            llm = LLM(folder, EngineConfig(**{**base, flag: value}))
            assert len(llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) in (1, 2, 3)
        except HeadstartError as error:
            assert name in str(error), value


def test_threads_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = pytest.importorskip("headstart.kernels.native.backend", exc_type=ImportError)

    def refuse(*_: object) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(backend, "ThreadPool", refuse)
    with pytest.raises(UsageError, match="the system starts no 3 threads: Resource temporarily unavailable"):
        backend.NativeBackend(threads=3)
    monkeypatch.setattr(machine, "threads", lambda: machine.Threads(4, 4, None))
    with pytest.raises(UsageError, match="--threads is 33, but this machine has 4 cores"):
        native.open_native(EngineConfig(threads=33), ())


@pytest.mark.parametrize("token", [VOCAB, -1, 2**40])
def test_a_drafter_cannot_reach_past_the_vocabulary(token: int) -> None:
    """Somebody else's drafter: its ids are checked before a kernel reads by them."""
    llm = LLM(headed_model("mimo"), replace(EngineConfig(**SMALL), depth=2))

    def wild(requests: Any) -> None:
        for request in requests:
            request.sequence.draft = Draft([5, token], method="mtp")

    llm.engine.drafting.drafter.propose = wild
    with pytest.raises(AssertionError, match=f"mtp drafts ids past {VOCAB - 1}"):
        llm.generate([[1, 2, 3]])
