"""Engines on the cuda backend: the text of `reference`, with drafts and without."""

from typing import Any

import pytest
from support import SMALL, family_of, new_folder, request, run, soften
from tiny_models import write_model

from headstart.config import EngineConfig
from headstart.engine.build import build_engine
from headstart.engine.load import load_model
from headstart.errors import UsageError

PROMPT = (3, 5, 7, 5, 7, 5, 9, 5, 7, 5)


@pytest.mark.slow
def test_text_equals_reference_with_and_without_drafts() -> None:
    """Sampled, with some drafts accepted."""
    config, arrays = family_of("llama").tiny(num_hidden_layers=1)
    folder, texts, accepted = write_model(new_folder(), config, soften(arrays, 0.1)), list[list[int]](), 0
    for backend, depth in (("reference", 0), ("cuda", 0), ("cuda", 3)):
        kv: Any = "float32" if backend == "cuda" else None
        wanted = EngineConfig(**{**SMALL, "backend": backend, "kv_cache_dtype": kv, "drafter": "ngram", "depth": 3})
        engine = build_engine(load_model(str(folder), wanted), wanted)
        submitted = request(PROMPT, seed=3, depth=depth, stops=(), max_tokens=6, temperature=0.2)
        texts.append(run(engine, [submitted])["r", 0].tokens)
        accepted = engine.stats.accepted
    assert texts[0] == texts[1] == texts[2] and accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v4", "granitemoehybrid"])
def test_families_equal_reference(family: str) -> None:
    """Covers compressed attention, an indexer, experts and streams, and Mamba2. `benchmarks/verify_families.py
    --columns cuda` checks all families."""
    config, arrays = family_of(family).tiny()
    folder, texts = write_model(new_folder(), config, soften(arrays, 0.1)), list[list[int]]()
    for backend in ("reference", "cuda"):
        kept: dict[str, Any] = {"kv_cache_dtype": "float32", "drafter": "ngram", "depth": 2}
        more = kept if backend == "cuda" else {"drafter": "none"}
        wanted = EngineConfig(**{**SMALL, "backend": backend, "max_num_batched_tokens": 7, **more})
        submitted = request(PROMPT[:8], max_tokens=3, stops=())
        texts.append(run(build_engine(load_model(str(folder), wanted), wanted), [submitted])["r", 0].tokens)
    assert texts[0] == texts[1] and len(texts[0]) == 3


def test_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.kernels.cuda import device

    monkeypatch.setattr(device, "is_interpreted", lambda: False)
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="the backend is cuda, but torch finds no CUDA GPU"):
        device.open_device()


def test_every_operation_is_implemented() -> None:
    """The exception is the operation of an AdapterBackend."""
    from headstart.kernels.cuda.backend import CudaBackend
    from headstart.kernels.cuda.ops import CudaOps
    from headstart.kernels.ops import AdapterBackend, Ops

    wanted = {name for name in vars(Ops) if not name.startswith("_")}
    assert len(wanted) > 30 and {name for name in wanted if not hasattr(CudaOps, name)} == {"adapted_linear"}
    assert not isinstance(CudaBackend(), AdapterBackend)
