"""An engine on the cuda backend: the text of `reference`, with drafts and without."""

from __future__ import annotations

from typing import Any

import pytest
from support import SMALL, family_of, new_folder, soften

from headstart.config import EngineConfig
from headstart.core import Request, SamplingParams
from headstart.engine.load import load_model
from headstart.engine.make import make_engine
from headstart.errors import ModelError, UsageError
from headstart.tools.tiny import write_model

PROMPT = (3, 5, 7, 5, 7, 5, 9, 5, 7, 5)


@pytest.mark.slow
def test_the_text_is_that_of_reference_and_of_no_draft() -> None:
    """Sampled, with drafts of which some are right."""
    config, arrays = family_of("llama").tiny(num_hidden_layers=1)
    folder, texts, accepted = write_model(new_folder(), config, soften(arrays, 0.1)), list[list[int]](), 0
    for backend, depth in (("reference", 0), ("cuda", 0), ("cuda", 3)):
        kv: Any = "float32" if backend == "cuda" else None
        wanted = EngineConfig(**{**SMALL, "backend": backend, "kv_cache_dtype": kv, "drafter": "ngram", "depth": 3})
        engine = make_engine(load_model(str(folder), wanted), wanted)
        params = SamplingParams(max_tokens=6, temperature=0.2)
        request = Request(request_id="a", prompt_ids=PROMPT, params=params, seed=3, stop_ids=frozenset(), depth=depth)
        engine.submit(request)
        texts.append([])
        while engine.has_work:
            engine.step(lambda deltas: texts[-1].extend(token for delta in deltas for token in delta.tokens))
        accepted = engine.stats.accepted
    assert texts[0] == texts[1] == texts[2] and accepted > 0


def test_what_has_no_kernel_is_said_when_it_is_loaded() -> None:
    config, arrays = family_of("deepseek_v32").tiny()
    wanted = EngineConfig(**{**SMALL, "backend": "cuda", "drafter": "none"})
    model = load_model(str(write_model(new_folder(), config, arrays)), wanted)
    with pytest.raises(ModelError, match="the cuda backend has no kernel yet for"):
        make_engine(model, wanted)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.kernels.cuda import device

    monkeypatch.setattr(device, "interpreted", lambda: False)
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="the backend is cuda, but torch finds no CUDA GPU"):
        device.open_device()
