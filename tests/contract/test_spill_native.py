"""KV spill on the native backend: a later process gives the same bits from stored blocks."""

import json
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from tiny_models import write_model

from headstart.api import LLM
from headstart.core import SamplingParams
from headstart.kernels.ops import AttentionSpec

_native: Any = pytest.importorskip("headstart.kernels.native._native")
FAMILIES = ("llama", "qwen3_5", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gemma3", "mimo")
PROMPT = support.prompt_of(300, 1)
SETTINGS: dict[str, Any] = {"backend": "native", "threads": 1, "max_model_len": 400, "kv_blocks": 60, "depth": 2}
"""With depth auto a head is asked only where drafts pay, which depends on the load of the machine."""


@cache
def model_of(family: str) -> str:
    return str(write_model(support.new_folder(), *support.family_of(family).tiny()))


def answer(llm: LLM, seed: int = 1) -> tuple[list[int], list[float]]:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=seed, logprobs=0, ignore_eos=True)
    found = llm.generate([PROMPT], params)[0]
    return found.token_ids, [each.logprob for each in found.logprobs]


OTHER_KINDS = [("llama", "int8"), ("deepseek_v4", "int8"), ("llama", "float32"), ("llama", "fp8")]
"""Types of keys change how wide a slot is and nothing else."""


@pytest.mark.parametrize(("family", "kind"), [*((family, "bfloat16") for family in FAMILIES), *OTHER_KINDS])
def test_stored_blocks_give_the_same_bits(family: str, kind: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "kv_cache_dtype": kind}
    with LLM(model_of(family), **settings) as plain:
        expected = answer(plain)
    with LLM(model_of(family), **settings, kv_spill=str(tmp_path)) as first:
        assert answer(first) == expected
    with LLM(model_of(family), **settings, kv_spill=str(tmp_path)) as second:
        assert answer(second) == expected and second.engine.memory.spill.hits.total() == 288
        for number, part in second.engine.memory.spill._parts.items():
            assert number == -2 or any(part.read(block)[0].any() for block in range(SETTINGS["kv_blocks"])), number


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_portable_blocks_serve_other_paths(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks written by the portable path are read by the best path, only with portable bits."""
    settings = {**SETTINGS, "portable_bits": True, "kv_spill": str(tmp_path)}
    with monkeypatch.context() as changed:
        changed.setattr("headstart.kernels.native.backend.paths", lambda portable_bits: ["portable"])
        with LLM(model_of(family), **settings) as first:
            expected = answer(first)
    with LLM(model_of(family), **settings) as second:
        assert second.model.backend.path == _native.paths(True)[0]
        assert answer(second) == expected and second.engine.memory.spill.hits.total() == 288
    with LLM(model_of(family), **settings | {"portable_bits": False}) as third:
        answer(third)
        assert third.engine.memory.spill.hits.total() == 0


def test_slots_are_views_of_the_pool() -> None:
    from headstart.kernels.native.backend import NativeBackend

    backend = NativeBackend(threads=1)
    pool = backend.kv_pool(64, AttentionSpec(4, 2, 24, 1.0))
    values = np.random.default_rng(0).integers(0, 256, len(backend.read_slots(pool, 0, 32)), np.uint8)
    backend.write_slots(pool, 32, values)
    assert (backend.read_slots(pool, 32, 32) == values).all() and not backend.read_slots(pool, 0, 32).any()
    for first, count in ((0, 8), (8, 16), (48, 32), (-16, 16), (0, 2**62)):
        with pytest.raises(ValueError, match="no such slots"):
            backend.read_slots(pool, first, count)
    view = backend.read_slots(pool, 32, 32)
    del pool
    assert (view == values).all(), "a view keeps its pool"


WRITER = """
import sys, json
from headstart.api import LLM
from headstart.core import SamplingParams
sys.path.insert(0, sys.argv[3])
llm = LLM(sys.argv[1], backend="native", threads=1, max_model_len=400, kv_blocks=60, kv_spill=sys.argv[2])
import numpy as np
print("ready", flush=True)
for turn in range(int(sys.argv[4]), 10**6):
    prompt = np.random.default_rng(turn % 40).integers(3, 100, 300).tolist()
    done = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    print(json.dumps([turn, done.token_ids]), flush=True)
"""


def start_writer(folder: Path, first: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", WRITER, model_of("llama"), str(folder), str(Path(__file__).parent), str(first)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killed_writers_leave_valid_blocks(tmp_path: Path) -> None:
    """After kill -9 of one of two writers the other continues, and later engines find only valid blocks."""
    processes = [start_writer(tmp_path, 0), start_writer(tmp_path, 20)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    lines = []
    for process, count in zip(processes, (8, 16), strict=True):
        lines += [json.loads(process.stdout.readline()) for _ in range(count)]
        process.send_signal(signal.SIGKILL)
        lines += [json.loads(line) for line in process.communicate()[0].splitlines() if line.endswith("]")]
    with LLM(model_of("llama"), **SETTINGS, kv_spill=str(tmp_path)) as llm, LLM(model_of("llama"), **SETTINGS) as plain:
        for turn, tokens in lines:
            prompt = np.random.default_rng(turn % 40).integers(3, 100, 300).tolist()
            for each in (llm, plain):
                assert each.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids == tokens
        assert llm.engine.memory.spill.hits.total() > 0 and not llm.engine.memory.spill.store.counts.dropped
