"""Vision towers in llama.cpp's projector files compared with the same models in safetensors."""

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from projector_files import write_both
from support import model_at, new_folder
from vision_models import KINDS, copied, published, random_image

from headstart.api import LLM
from headstart.api.images import require_image_processor
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.vision import VisionEncoder
from headstart.errors import ModelError, UsageError
from headstart.formats import gguf_file, open_checkpoint
from headstart.models import _clip
from headstart.models.tensors import find_family, find_vision, read_config
from headstart.tools.inspect.run import InspectOptions, run as inspect, runs_here

IMAGES = [random_image(1), random_image(2, 90, 23)]


@cache
def safetensors_folder(kind: str) -> Path:
    """A safetensors model that GGUF files can describe: Gemma 3 with its usual scale and layer types."""
    source = published(kind)[1]
    if kind != "gemma3":
        return source
    text = json.loads((source / "config.json").read_text())["text_config"]
    text |= {"query_pre_attn_scalar": text["head_dim"], "layer_types": ["sliding_attention"] * 3}
    (folder := new_folder()).mkdir()
    copied(source, folder, text_config=text)
    return folder


@cache
def gguf_path(kind: str) -> Path:
    return write_both(safetensors_folder(kind), new_folder())


def features(path: Path, backend: str) -> list[Any]:
    model = model_at(path, backend)
    assert model.vision and model.image_processor, model.no_tower
    encoder = VisionEncoder(model.backend, model.vision)
    pieces = [piece for image in IMAGES for piece in model.image_processor.prepare(image).pieces]
    return [encoder.features(piece.image) for piece in pieces]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_features_match_safetensors(kind: str, backend: str) -> None:
    ours, theirs = features(gguf_path(kind), backend), features(safetensors_folder(kind), backend)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_float16_features_are_close(kind: str, tmp_path: Path) -> None:
    half = write_both(published(kind)[1], tmp_path, dtype=np.float16)
    scale = np.abs(np.concatenate(features(gguf_path(kind), "reference"))).max()
    for one, other in zip(features(half, "reference"), features(gguf_path(kind), "reference"), strict=True):
        assert 0 < np.abs(one - other).max() < 5e-3 * scale


@pytest.mark.parametrize("kind", KINDS)
def test_chat_answers_match_safetensors(kind: str) -> None:
    """Logprobs and greedy text of a conversation with two images, with tokenizer and chat template from the files."""
    parts = [{"type": "image", "image": each} for each in IMAGES] + [{"type": "text", "text": "What is it?"}]
    params, found = SamplingParams(max_tokens=8, temperature=0, logprobs=3), []
    for path in (gguf_path(kind), safetensors_folder(kind)):
        config = EngineConfig(threads=1, max_model_len=512, kv_blocks=64, kv_cache_dtype="float32", drafter="ngram")
        llm = LLM(str(path), config)
        (one,) = llm.chat([{"role": "user", "content": parts}], params)
        found.append(one)
        llm.close()
    assert found[0].token_ids == found[1].token_ids
    assert len(found[0].prompt_token_ids) == len(found[1].prompt_token_ids)
    logprobs = [[entry.logprob for entry in each.logprobs] for each in found]
    np.testing.assert_allclose(*logprobs, atol=2e-3)


def test_older_files_with_swapped_up_and_down_are_read(tmp_path: Path) -> None:
    other = {"up": "down", "down": "up"}
    path = write_both(
        published("gemma3")[1], tmp_path,
        rename=lambda name: re.sub(r"ffn_(up|down)", lambda match: f"ffn_{other[match[1]]}", name),
    )  # fmt: skip
    for one, other_ in zip(features(path, "reference"), features(gguf_path("gemma3"), "reference"), strict=True):
        np.testing.assert_array_equal(one, other_)


BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "without a tensor": ("qwen3_vl", {"rename": lambda name: "" if name == "v.blk.1.ffn_up.bias" else name},
                         "tensor v.blk.1.ffn_up.bias of the vision tower is missing; download the file again"),
    "of another kind": ("smolvlm", {"kind": "internvl"}, "the vision tower of internvl models is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_projector_leaves_a_text_model(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, options, message = BROKEN[name]
    path = write_both(published(kind)[1], tmp_path, **options)
    model = model_at(path)
    assert model.no_tower.startswith(message) and f"reads text only: {model.no_tower}" in caplog.text
    assert any(f"reads text only: {model.no_tower}" in line for line in inspect(InspectOptions(model=str(path))).lines)
    with pytest.raises(UsageError, match="reads text only"):
        require_image_processor(model)
    with pytest.raises(UsageError, match=re.escape(f"--mmproj: {message}")):
        LLM(str(path), EngineConfig(threads=1, mmproj=str(tmp_path / "mmproj-F32.gguf")))


def test_projector_is_found_beside_the_model_or_by_flag(tmp_path: Path) -> None:
    path, whole = gguf_path("smolvlm"), published("smolvlm")[1]
    assert runs_here(open_checkpoint(path))["vision"] == {"layers": 2, "tokens": 40}
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(path.read_bytes())
    assert model_at(alone).image_processor is None
    copied(whole, tmp_path, "vision_model")  # --mmproj works for safetensors as well
    for model in (alone, tmp_path):
        llm = LLM(str(model), EngineConfig(threads=1, max_model_len=512, mmproj=str(path.with_name("mmproj-F32.gguf"))))
        assert llm.image_processor is not None
        llm.close()
    with pytest.raises(UsageError, match=r"alone\.gguf has no vision tower"):
        LLM(str(path), EngineConfig(threads=1, mmproj=str(alone)))
    with pytest.raises(UsageError, match="--mmproj: /no/such is not a file"):
        EngineConfig(mmproj="/no/such")


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_metadata_raises_model_errors_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(gguf_path(kind))
    family = find_family(checkpoint)
    trunk = read_config(checkpoint, family)
    assert checkpoint.projector
    file, refused = gguf_file.read(checkpoint.projector), 0
    for key in [each for each in file.metadata if each.startswith("clip.")]:
        arrays = np.array([0, 0.5, 3]), np.array([]), ["x"]
        for value in (None, 0, -1, 3, 2**30, 2**40, 0.5, math.nan, "x", True, *arrays):
            changed = {name: each for name, each in {**file.metadata, key: value}.items() if each is not None}
            monkeypatch.setattr(_clip, "read", lambda _, found=changed: replace(file, metadata=found))
            try:
                assert find_vision(checkpoint, family, trunk)
            except ModelError as error:
                refused += bool(error.message)
    assert refused > 20
