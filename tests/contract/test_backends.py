"""Backends as plug-ins: selection, flags, a plug-in of one file, and memory released by engines."""

import gc
import importlib.util
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
from seams import plugged_in
from support import family_of
from tiny_models import write_model

from headstart import machine
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.load import load_model
from headstart.errors import UsageError
from headstart.kernels.backend import select_backend
from headstart.kernels.backends import native, reference


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    changes = {"num_hidden_layers": 2, "num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 64}
    config, arrays = family_of("llama").tiny(**changes, max_position_embeddings=1024)
    return write_model(tmp_path / "model", config, arrays)


def hide_modules(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else original(name))


def test_best_available_backend_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_modules(monkeypatch, native.EXTENSION)
    chosen = select_backend(EngineConfig())
    assert (chosen.name, chosen.kind) == ("reference", reference.BACKEND)
    assert chosen.why == "headstart was installed without a C++ compiler"
    with pytest.raises(UsageError, match="backend native cannot run: headstart was installed without"):
        select_backend(EngineConfig(backend="native"))
    with pytest.raises(UsageError, match="--quantization int8 needs the native backend") as error:
        select_backend(EngineConfig(quantization="int8"))
    assert error.value.hint == "headstart was installed without a C++ compiler"
    hide_modules(monkeypatch, native.EXTENSION, "torch")
    with pytest.raises(UsageError, match=r"without a C\+\+ compiler, and backend reference .* needs torch"):
        select_backend(EngineConfig())


def test_flags_of_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "BACKEND", replace(native.BACKEND, limits=lambda config: None))
    monkeypatch.setattr(reference, "BACKEND", replace(reference.BACKEND, limits=lambda config: None))
    assert select_backend(EngineConfig()) == ("native", native.BACKEND, native.BACKEND.why)
    for kv_dtype in ("int8", "fp8"):
        assert select_backend(EngineConfig(backend="native", kv_cache_dtype=kv_dtype)).name == "native"
        with pytest.raises(UsageError, match=f"--kv-cache-dtype {kv_dtype} needs the native backend") as error:
            select_backend(EngineConfig(backend="reference", kv_cache_dtype=kv_dtype))
    assert error.value.hint == "use --backend auto"
    with pytest.raises(UsageError, match="--backend is 'quantum', which is unknown") as error:
        EngineConfig(backend="quantum")
    assert error.value.hint == "choose from: auto, cuda, native, reference"


@pytest.mark.slow
def test_backend_plug_in_of_one_file(tmp_path: Path, folder: Path) -> None:
    """The backend of docs/extend."""
    with plugged_in(tmp_path, "backends"):
        config = EngineConfig(backend="thin", threads=1, max_model_len=64)
        model = load_model(str(folder), config)
        assert model.backend.name == "thin"
        tokens = answer(LLM(model, config))
    plain = EngineConfig(backend="reference", dtype="float64", threads=1, max_model_len=64)
    assert tokens == answer(LLM(load_model(str(folder), plain), plain))


def answer(llm: LLM) -> tuple[int, ...]:
    [completion] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    return tuple(completion.token_ids)


def resident_bytes() -> int:
    return int(re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_deleted_engines_release_their_memory(backend: str, folder: Path) -> None:
    """Each engine fills 4 MB of keys and values. A leak would grow memory in every step, other allocations of the
    process only in some."""
    if backend == "native":
        pytest.importorskip(native.EXTENSION, exc_type=ImportError)
    config = EngineConfig(backend=backend, threads=1, max_model_len=1024, kv_blocks=64, drafter="none", depth=0)
    model = load_model(str(folder), config)
    after: list[int] = []
    for _ in range(20):
        LLM(model, config).generate([[1 + i % 7 for i in range(1000)]], SamplingParams(max_tokens=2))
        gc.collect()
        after.append(resident_bytes())
    steps = [later - earlier for earlier, later in pairwise(after[3:])]
    assert sum(step > 1 << 20 for step in steps) < len(steps) / 2, steps


def test_kv_cache_is_sized_by_container_memory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The KV cache takes a share of the cgroup's free memory, not of the host's."""
    config = EngineConfig(backend="reference", threads=1, max_num_seqs=1000)
    model = load_model(str(folder), config)
    monkeypatch.setattr("headstart.engine.build.PLANNED", WeakKeyDictionary())  # without engines of other tests
    sizes = []
    for free in (64 << 20, 256 << 20):
        monkeypatch.setattr(machine, "memory", lambda free=free: machine.Memory(1 << 40, free, 1 << 30))
        assert model.backend.free_memory() == free
        sizes.append(len(LLM(model, config).engine.memory.pool.blocks))
    assert sizes[0] < sizes[1] <= 4 * sizes[0]
