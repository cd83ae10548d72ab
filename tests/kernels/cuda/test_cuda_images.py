"""Images on the cuda backend: features and drafts of `reference`, with rotary positions that have axes
(RopeSpec.axes)."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import make, model_at, record_drafts, request, run
from test_cuda_recording import ReplayingGraphs, recording_on
from vision_models import published, random_image

from headstart.engine.load import Model
from headstart.engine.vision import VisionEncoder

pytestmark = pytest.mark.slow
IMAGE = random_image(2, 33, 28)
FLOATS: dict[str, Any] = {"kv_cache_dtype": "float32"}


def models_of(kind: str) -> tuple[Model, Model]:
    """The model on `reference` and on `cuda`."""
    folder = published(kind)[1]
    return model_at(folder, "reference"), model_at(folder, "cuda", **FLOATS)


def test_image_features_match_reference() -> None:
    """The tower rotates patches by row and column."""
    found = []
    for model in models_of("mistral3"):
        assert model.vision and model.image_processor
        found.append(
            VisionEncoder(model.backend, model.vision).features(model.image_processor.prepare(IMAGE).pieces[0].image)
        )
    np.testing.assert_allclose(*found, rtol=2e-4, atol=2e-5)


def test_drafts_after_an_image_match_reference() -> None:
    """Drafted tokens have the rotary positions of committed tokens, in recorded drafts as well."""
    found = []
    for model in models_of("qwen3_5"):
        assert model.image_processor
        ids = model.tokenizer.encode(f"a{model.image_processor.placeholder}b")
        ids, images = model.image_processor.expand(ids, [model.image_processor.prepare(IMAGE)])
        submitted = replace(request(ids, max_tokens=5, stops=()), images=images)
        kept = FLOATS if model.backend.name == "cuda" else {}
        with recording_on(model, ReplayingGraphs().device()) if kept else nullcontext():
            engine = make(model, backend=model.backend.name, dtype="float32", drafter="mtp", depth=3, **kept)
            drafts = record_drafts(engine)
            run(engine, [submitted])
        found.append(drafts)
    assert found[0] == found[1] and max(len(drafted) for _, drafted in found[0]) == 3
