"""Images in prompts: logits and texts equal transformers' classes, and texts are independent of the batch."""

import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import make, model_at, request, run
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4 import image_processing_pil_gemma4
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string
from vision_models import CUT, FILLED, GEMMA4, KINDS, LONGEST, PREPARATION, QWEN, copied, published, qwen, random_image

from headstart.api.images import require_image_processor
from headstart.core import Request, Sequence, Span
from headstart.engine import build
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.engine.runner import Runner
from headstart.engine.vision import MAX_BYTES, VisionEncoder
from headstart.errors import UsageError
from headstart.text.images import ImageError
from headstart.tools.inspect.run import InspectOptions, run as inspect, runs_here

TEXT = "What is on it?"
IMAGES = {1: random_image(1), 2: random_image(2, 90, 23), 3: random_image(3, 31, 64), 4: random_image(4, 1, 1)}


image_processing_pil_gemma4._SUPPORTED_SOFT_TOKENS += (FILLED["max_soft_tokens"],)  # transformers refuses tiny images
PROCESSORS = {
    "gemma3": Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
    "smolvlm": SmolVLMImageProcessorPil(**CUT, return_row_col_info=True),
    "mistral3": PixtralImageProcessorPil(**{**LONGEST, "patch_size": {"height": 8, "width": 8}}),
    **dict.fromkeys(GEMMA4, image_processing_pil_gemma4.Gemma4ImageProcessorPil(**FILLED)),
    "qwen": Qwen2VLImageProcessorPil(**PREPARATION),
}


NOT_OF_MODELS = ("num_crops", "rows", "cols", "num_soft_tokens_per_image")


@cache
def load_vision_model(kind: str, backend: str) -> Model:
    settings: dict[str, Any] = {"kv_cache_dtype": "float32"} if backend == "native" else {}
    return model_at(published(kind)[1], backend, **settings)


def engine_of(model: Model, **settings: Any) -> Engine:
    kept = "float32" if model.backend.name == "native" else None
    common = {"backend": model.backend.name, "dtype": "float32", "block_size": 16, "kv_cache_dtype": kept}
    return make(model, **{**common, **settings})


def request_with_images(model: Model, images: Seq[int], text: str = TEXT, **params: Any) -> Request:
    """A request with a placeholder for each image, the last one in the middle of the text."""
    assert model.image_processor
    marked = "".join(f"a{model.image_processor.placeholder}" for _ in images) + text
    ids = model.tokenizer.encode(marked)
    ids, images = model.image_processor.expand(ids, [model.image_processor.prepare(IMAGES[seed]) for seed in images])
    return replace(request(ids, **params), images=images)


def expected_outputs(kind: str, images: Seq[int], one: Request, count: int) -> tuple[torch.Tensor, list[int]]:
    """Logits [T, V] of the prompt and greedy text, by transformers."""
    oracle, _ = published(kind)
    prepared = PROCESSORS.get(kind, PROCESSORS["qwen"])([IMAGES[seed].pixels for seed in images], return_tensors="pt")
    prepared = {key: value for key, value in prepared.items() if key not in NOT_OF_MODELS}
    ids, texts = list(one.prompt_ids), list[int]()
    for placed in one.images:
        ids[placed.first : placed.end] = [oracle.config.image_token_id] * (placed.end - placed.first)
    first = None
    with torch.inference_mode():
        for _ in range(count):
            kinds = torch.tensor([[int(token == oracle.config.image_token_id) for token in ids]])
            name = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids"
            about = {**prepared, **({} if kind in ("smolvlm", "mistral3") else {name: kinds})}
            logits = oracle(torch.tensor([ids]), use_cache=False, **about).logits[0]
            first = logits if first is None else first
            texts.append(int(logits[-1].argmax()))
            ids.append(texts[-1])
    assert first is not None
    return first, texts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_logits_and_texts_match_transformers(kind: str, backend: str) -> None:
    model = load_vision_model(kind, backend)
    engine = engine_of(model, max_model_len=256, kv_blocks=32)
    one = request_with_images(model, [1, 2, 3], max_tokens=8)
    expected, text = expected_outputs(kind, [1, 2, 3], one, 8)
    sequence = Sequence(replace(one, params=replace(one.params, prompt_logprobs=0)), 0, list(one.prompt_ids), 0)
    assert engine.memory.reserve(sequence, len(sequence.tokens))
    logits = engine.runner.forward([Span(sequence, 0, len(sequence.tokens), 1)]).logits
    limit = {"gemma3": 2e-3}.get(kind, 2e-4)
    np.testing.assert_allclose(model.backend.numpy(logits), expected.numpy(), rtol=limit, atol=limit)
    engine.memory.release(sequence)
    assert run(engine, [one])["r", 0].tokens == text


@pytest.mark.parametrize("kind", GEMMA4)
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_features_of_gemma4_match_transformers(kind: str, backend: str) -> None:
    """Images of odd sizes, with the grids of transformers' processor."""
    model, oracle = load_vision_model(kind, backend), published(kind)[0]
    sizes = [(50, 41), (90, 23), (1, 1), (5, 70), (333, 7), (7, 333), (400, 400), (8, 8)]
    images = [random_image(5, width, height) for width, height in sizes]
    found = PROCESSORS[kind]([each.pixels for each in images], return_tensors="pt", input_data_format="channels_last")
    with torch.inference_mode():
        features = oracle.model.get_image_features(found["pixel_values"], found["image_position_ids"]).pooler_output
    assert model.vision and model.image_processor
    encoder = VisionEncoder(model.backend, model.vision)
    for image, expected, places in zip(images, features, found["image_position_ids"], strict=True):
        (piece,) = model.image_processor.prepare(image).pieces
        assert piece.image.grid == tuple((int(places[:, axis].max()) + 1) // 2 for axis in (1, 0))
        np.testing.assert_allclose(encoder.features(piece.image), expected.numpy(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_independent_of_the_batch(kind: str) -> None:
    model = load_vision_model(kind, "native")
    requests = [
        request_with_images(model, images, text, name=str(i), max_tokens=20, temperature=temperature)
        for i, (images, text, temperature) in enumerate(
            [([1], TEXT, 0.0), ([2], TEXT, 0.8), ([1, 2], "Hm?", 0.0), ([], "no image at all", 0.9), ([1], TEXT, 0.0)]
        )
    ]
    head = {"drafter": "mtp"} if kind == "qwen3_5" else {"drafter": "ngram"}

    def texts(**more: Any) -> dict[Any, list[int]]:
        found = run(engine_of(model, **more), requests)
        return {key: each.tokens for key, each in found.items()}

    alone = texts(max_num_seqs=1, kv_blocks=16, drafter="none", enable_prefix_caching=False)
    assert alone["0", 0] == alone["4", 0] != alone["1", 0]
    assert texts(max_num_seqs=8, drafter="ngram", depth=3) == alone
    assert texts(max_num_seqs=8, depth=3, **head) == alone
    for budget in (5, 19, 24):  # smaller than an image, so images are cut
        assert texts(max_num_batched_tokens=budget, depth=2, **head) == alone
    engine = engine_of(model, max_num_seqs=4, kv_blocks=9, max_num_batched_tokens=19, depth=2, **head)
    crowded = {key: each.tokens for key, each in run(engine, requests).items()}
    assert crowded == alone and engine.scheduler.num_preemptions


def test_whole_and_stepwise_drafts_after_images_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted tokens after an image have the rotary positions of committed tokens."""
    model = load_vision_model("qwen3_5", "native")
    one = request_with_images(model, [2, 1], max_tokens=24, ignore_eos=True, temperature=0.8)

    def drafts() -> list[list[int]]:
        found = list[list[int]]()
        engine = engine_of(model, drafter="mtp", depth=4, enable_prefix_caching=False)
        run(engine, [one], lambda e: found.extend(list(each.draft.tokens) for each in e.scheduler.running))
        return found

    together = drafts()
    monkeypatch.setattr(Runner, "_draft_loop", lambda self, steps: None)
    assert drafts() == together
    assert sum(map(len, together)) > 40


@pytest.mark.parametrize("kind", QWEN)
def test_features_are_independent_of_the_pool(kind: str) -> None:
    model = load_vision_model(kind, "native")
    assert model.vision and model.image_processor
    images = [model.image_processor.prepare(each).pieces[0].image for each in IMAGES.values()]
    alone = [VisionEncoder(model.backend, model.vision).features(each) for each in images]
    encoder = VisionEncoder(model.backend, model.vision)
    encoder._reserve(1 << 14)
    for image, features in reversed(list(zip(images, alone, strict=True))):
        np.testing.assert_array_equal(encoder.features(image), features)


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_kv_cache_leaves_memory_for_the_vision_tower(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, free, sizes = load_vision_model(kind, "native"), 2 * MAX_BYTES, list[int]()
    assert model.vision and model.image_processor
    monkeypatch.setattr(type(model.backend), "free_memory", lambda self: free)
    largest = max(
        each.image.patches.shape[0] for each in model.image_processor.prepare(random_image(1, 400, 400)).pieces
    )
    assert model.image_processor.max_patches == largest
    encoder = VisionEncoder(model.backend, model.vision)
    encoder.features(model.image_processor.prepare(random_image(1, 400, 400)).pieces[0].image)
    used = encoder._programs.num_slots * model.backend.kv_bytes(model.vision.config.spec)
    assert encoder.max_bytes(largest) == used + MAX_BYTES
    tower = encoder.max_bytes(largest)
    for each in (model, replace(model, vision=None, image_processor=None)):
        monkeypatch.setattr(build, "PLANNED", {})  # no other engines
        sizes.append(build.pool_bytes(engine_of(each, kv_blocks=None, max_num_seqs=4000, drafter="none")))
    assert sizes[0] - tower == pytest.approx(sizes[1] - build.MEMORY_SHARE["cpu"] * tower, rel=0.01)


def test_prefix_cache_distinguishes_images() -> None:
    model = load_vision_model("gemma3", "native")
    engine = engine_of(model)
    first, same, other = (request_with_images(model, [seed], TEXT, max_tokens=4) for seed in (1, 1, 2))
    assert first.prompt_ids == other.prompt_ids
    expected = run(engine, [first])["r", 0].tokens
    hits = engine.scheduler.prefix_hits
    assert run(engine, [same])["r", 0].tokens == expected
    assert engine.scheduler.prefix_hits >= hits + 16
    hits = engine.scheduler.prefix_hits
    run(engine, [other])
    assert engine.scheduler.prefix_hits == hits


def test_vision_towers_are_reported(tmp_path: Path) -> None:
    model = load_vision_model("gemma3", "reference")
    assert runs_here(model.checkpoint)["vision"] == {"layers": 2, "tokens": 16}
    assert runs_here(load_vision_model("qwen3_vl", "reference").checkpoint)["vision"] == {"layers": 3, "tokens": 32}
    assert runs_here(load_vision_model("smolvlm", "reference").checkpoint)["vision"] == {"layers": 2, "tokens": 40}
    copied(qwen("qwen2_5_vl")[1], tmp_path, model_type="qwen2_vl")
    with pytest.raises(UsageError, match="reads text only: the vision tower of qwen2_vl models is not supported"):
        require_image_processor(model_at(tmp_path))


def test_image_tiles_match_transformers() -> None:
    """Prompts equal those of transformers' processor."""
    model, sizes = (
        load_vision_model("smolvlm", "reference"),
        [(50, 41), (90, 23), (31, 64), (16, 15), (333, 7), (5, 70)],
    )
    some = [random_image(1, width, height) for width, height in sizes]
    assert model.image_processor
    found = PROCESSORS["smolvlm"]([each.pixels for each in some], return_tensors="np")
    assert max(found["rows"][0]) == max(found["cols"][0]) == 3
    for image, rows, columns in zip(some, found["rows"][0], found["cols"][0], strict=True):
        text = get_image_prompt_string(rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>")
        ids, images = model.image_processor.expand(
            model.tokenizer.encode("a<image>b"), [model.image_processor.prepare(image)]
        )
        assert ids == model.tokenizer.encode(f"a{text}b")
        assert sum(each.end - each.first for each in images) == text.count("<image>")


def test_image_grids_and_size_limits() -> None:
    processor = load_vision_model("qwen3_vl", "reference").image_processor
    assert processor
    assert [processor.prepare(each).pieces[0].image.grid for each in IMAGES.values()] == [
        (5, 6),
        (2, 11),
        (8, 4),
        (2, 2),
    ]
    with pytest.raises(ImageError, match="402 x 2 pixels, and one side may be 200 times the other"):
        processor.prepare(random_image(1, 402, 2))


def test_placeholders_are_expanded() -> None:
    processor = load_vision_model("gemma3", "reference").image_processor
    tokenizer = load_vision_model("gemma3", "reference").tokenizer
    assert processor
    image = processor.prepare(random_image(1))
    ids, (placed,) = processor.expand(tokenizer.encode("user\n<start_of_image>\nWhat"), [image])
    row = ids[placed.first]
    text = "user\n\n\n<start_of_image><end_of_image>\n\n\nWhat"
    assert [token for token in ids if token != row] == tokenizer.encode(text) and ids.count(row) == 16
    with pytest.raises(UsageError, match="has 1 placeholders <start_of_image> for 2 images"):
        processor.expand(tokenizer.encode("<start_of_image>"), [image, image])


WITHOUT = {
    ("gemma3", "vision_tower"): "tensor vision_tower.encoder.layers.0.layer_norm1.bias",
    ("gemma3", "layers.0.mlp.fc1.bias"): "tensor vision_tower.encoder.layers.0.mlp.fc1.bias",
    ("qwen3_5", "blocks.1.attn.qkv.weight"): "tensor model.visual.blocks.1.attn.qkv.weight",
    ("qwen3_vl", "visual."): "no file has its tensors",
    ("smolvlm", ""): "mlp.up_proj.weight has shape (40, 24), but the config implies (44, 24)",
}
"""(model, part of the names of tensors that are left out; empty: its config has other sizes) -> what is said."""


@pytest.mark.parametrize(("kind", "without"), WITHOUT)
def test_model_with_an_incomplete_tower_reads_text_only(
    kind: str, without: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = published(kind)[1]
    vision = json.loads((source / "config.json").read_text())["vision_config"]
    copied(source, tmp_path, without, vision_config=vision if without else {**vision, "intermediate_size": 44})
    model = model_at(tmp_path)
    message = WITHOUT[kind, without]
    warnings = [each.getMessage() for each in caplog.records if "reads text only" in each.getMessage()]
    assert len(warnings) == 1 and warnings[0].endswith(f"reads text only: {model.no_tower}")
    assert message in model.no_tower
    report = inspect(InspectOptions(model=str(tmp_path))).lines
    assert not without or f"  reads text only: {model.no_tower}" in report
    assert not without or model.no_tower.endswith("headstart pull REPO")
    with pytest.raises(UsageError, match="reads text only: "):
        require_image_processor(model)
    ids = model.tokenizer.encode(TEXT)
    whole = load_vision_model(kind, "reference")
    texts = [run(make(each, dtype="float32"), [request(ids, max_tokens=4)])["r", 0] for each in (model, whole)]
    assert texts[0].tokens == texts[1].tokens
