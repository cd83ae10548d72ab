"""Building engines: memory taken by the pools, and invalid flag values."""

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


def pool_bytes(llm: LLM) -> int:
    """Bytes of all pools of `llm`, as the backend allocated them."""
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
def free_memory(monkeypatch: pytest.MonkeyPatch) -> int:
    """Mock machine with 64 of 128 MB free; gives the free bytes."""
    gc.collect()
    monkeypatch.setattr(make, "PLANNED", type(make.PLANNED)())
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(1 << 40, 64 << 20, 128 << 20))
    return 64 << 20


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_pools_stay_within_the_memory_budget(kind: str, free_memory: int) -> None:
    """Hidden states that EAGLE-3 keeps and the keys and values of an MTP head count as well."""
    llm = LLM(headed_model("llama", kind), EngineConfig(**AUTO_SIZED))
    assert llm.method == kind
    budget = free_memory * MEMORY_SHARE["cpu"]
    assert 0.9 * budget < pool_bytes(llm) <= budget


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_gpu_memory_utilization_sizes_the_cache(share: float, free_memory: int) -> None:
    """Half of the 128 MB is taken already."""
    llm = LLM(tiny_model("llama"), EngineConfig(**AUTO_SIZED, gpu_memory_utilization=share))
    budget = (128 << 20) * share - free_memory
    assert 0.9 * budget < pool_bytes(llm) <= budget


def test_engines_of_one_process_share_free_memory(free_memory: int) -> None:
    """Memory planned by other engines counts as taken before it is filled, and is free again once they are deleted."""
    model, config = tiny_model("llama"), EngineConfig(**AUTO_SIZED)
    llms = [LLM(model, config) for _ in range(5)]
    sizes = [pool_bytes(llm) for llm in llms]
    assert sum(sizes) < free_memory
    for one, following in pairwise(sizes):
        assert following == pytest.approx((1 - MEMORY_SHARE["cpu"]) * one, rel=0.02)
    del llms
    gc.collect()
    assert pool_bytes(LLM(model, config)) == sizes[0]


def test_full_memory_still_fits_one_sequence(free_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_flag_values_work_or_are_refused_by_name(flag: str, free_memory: int) -> None:
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


def test_unavailable_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_draft_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    """Token ids of a plug-in drafter are checked before a kernel uses them as indices."""
    llm = LLM(headed_model("mimo"), replace(EngineConfig(**SMALL), depth=2))

    def propose_invalid_token(requests: Any) -> None:
        for request in requests:
            request.sequence.draft = Draft([5, token], method="mtp")

    llm.engine.drafting.drafter.propose = propose_invalid_token
    with pytest.raises(AssertionError, match=f"mtp drafts ids past {VOCAB - 1}"):
        llm.generate([[1, 2, 3]])
