"""Pictures in prompts: logits and texts against transformers' classes; the same text in any company."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support import make, model_at, request, run
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from vision_models import gemma3, picture

from headstart.api.pictures import check_tower
from headstart.core import Request, Sequence, Span
from headstart.engine.load import Model
from headstart.errors import ModelError, UsageError
from headstart.formats import safetensors
from headstart.models.families import family_named
from headstart.tools.inspect.run import runs_here

TEXT = "What is on it?"


@cache
def seeing(backend: str) -> Model:
    settings: dict[str, Any] = {"kv_cache_dtype": "float32"} if backend == "native" else {}
    return model_at(gemma3()[1], backend, **settings)


def asked(model: Model, images: Seq[int], text: str = TEXT, **params: Any) -> Request:
    """A request with a placeholder for each picture, the last one in the middle of the text."""
    assert model.tower
    marked = "".join("a<start_of_image>" for _ in images) + text
    ids = model.tokenizer.encode(marked)
    ids, pictures = model.tower.expand(ids, [model.tower.prepare(picture(seed)) for seed in images])
    return replace(request(ids, **params), pictures=pictures)


def truth(images: Seq[int], prompt: Seq[int], count: int) -> tuple[torch.Tensor, list[int]]:
    """Logits [T, V] of the prompt by transformers, and its greedy text."""
    oracle, _ = gemma3()
    processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    pixels = processor([picture(seed).pixels for seed in images], return_tensors="pt").pixel_values
    ids, texts = list(prompt), list[int]()
    first = None
    with torch.inference_mode():
        for _ in range(count):
            kinds = torch.tensor([[int(token == oracle.config.image_token_id) for token in ids]])
            logits = oracle(torch.tensor([ids]), pixel_values=pixels, token_type_ids=kinds, use_cache=False).logits[0]
            first = logits if first is None else first
            texts.append(int(logits[-1].argmax()))
            ids.append(texts[-1])
    assert first is not None
    return first, texts


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_logits_and_texts_are_those_of_transformers(backend: str) -> None:
    model = seeing(backend)
    kept = "float32" if backend == "native" else None
    engine = make(model, backend=backend, dtype="float32", kv_cache_dtype=kept, block_size=16)
    one = asked(model, [1, 2], max_tokens=8)
    expected, text = truth([1, 2], one.prompt_ids, 8)
    sequence = Sequence(replace(one, params=replace(one.params, prompt_logprobs=0)), 0, list(one.prompt_ids), 0)
    assert engine.memory.reserve(sequence, len(sequence.tokens))
    logits = engine.runner.forward([Span(sequence, 0, len(sequence.tokens), 1)]).logits
    np.testing.assert_allclose(model.backend.numpy(logits), expected.numpy(), rtol=2e-3, atol=2e-3)
    engine.memory.release(sequence)
    assert run(engine, [one])["r", 0].tokens == text


def test_the_text_is_the_same_in_any_company() -> None:
    model = seeing("native")
    requests = [
        asked(model, images, text, name=str(i), max_tokens=20, temperature=temperature)
        for i, (images, text, temperature) in enumerate(
            [([1], TEXT, 0.0), ([2], TEXT, 0.8), ([1, 2], "Hm?", 0.0), ([], "no picture at all", 0.9), ([1], TEXT, 0.0)]
        )
    ]
    settings: dict[str, Any] = {"backend": "native", "dtype": "float32", "block_size": 16, "kv_cache_dtype": "float32"}

    def texts(**more: Any) -> dict[Any, list[int]]:
        found = run(make(model, **{**settings, **more}), requests)
        return {key: each.tokens for key, each in found.items()}

    alone = texts(max_num_seqs=1, kv_blocks=16, drafter="none", enable_prefix_caching=False)
    assert alone["0", 0] == alone["4", 0] != alone["1", 0]
    assert texts(max_num_seqs=8, drafter="ngram", depth=3) == alone
    for budget in (5, 19, 24):  # less than a picture, and cuts inside of it
        assert texts(max_num_batched_tokens=budget, drafter="ngram", depth=2) == alone
    engine = make(model, **{**settings, "max_num_seqs": 4, "kv_blocks": 9, "max_num_batched_tokens": 19})
    crowded = {key: each.tokens for key, each in run(engine, requests).items()}
    assert crowded == alone and engine.scheduler.num_preemptions


def test_the_prefix_cache_knows_pictures() -> None:
    model = seeing("native")
    engine = make(model, backend="native", dtype="float32", block_size=16, kv_cache_dtype="float32")
    first, same, other = (asked(model, [seed], TEXT, max_tokens=4) for seed in (1, 1, 2))
    assert first.prompt_ids == other.prompt_ids
    expected = run(engine, [first])["r", 0].tokens
    hits = engine.scheduler.prefix_hits
    assert run(engine, [same])["r", 0].tokens == expected
    assert engine.scheduler.prefix_hits >= hits + 16
    hits = engine.scheduler.prefix_hits
    run(engine, [other])
    assert engine.scheduler.prefix_hits == hits


def test_what_is_said_about_towers() -> None:
    model = seeing("reference")
    assert runs_here(model.checkpoint)["vision"] == {"layers": 2, "tokens": 16}
    config = {**model.checkpoint.config, "model_type": "qwen2_5_vl"}
    checkpoint = replace(model.checkpoint, config=config)
    blind = replace(model, tower=None, checkpoint=checkpoint, family=family_named("qwen2"))
    with pytest.raises(UsageError, match="the vision tower of qwen2_5_vl models is not supported"):
        check_tower(blind)


def test_placeholders() -> None:
    tower = seeing("reference").tower
    tokenizer = seeing("reference").tokenizer
    assert tower
    image = tower.prepare(picture(1))
    ids, (placed,) = tower.expand(tokenizer.encode("user\n<start_of_image>\nWhat"), [image])
    row = ids[placed.first]
    text = "user\n\n\n<start_of_image><end_of_image>\n\n\nWhat"
    assert [token for token in ids if token != row] == tokenizer.encode(text) and ids.count(row) == 16
    with pytest.raises(UsageError, match="has 1 placeholders <start_of_image> for 2 pictures"):
        tower.expand(tokenizer.encode("<start_of_image>"), [image, image])


def test_a_checkpoint_without_its_tower_reads_text(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder = gemma3()[1]
    tensors = safetensors.open_checkpoint(folder).tensors
    arrays = {name: tensor.float32() for name, tensor in tensors.items()}
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    safetensors.save(tmp_path / "model.safetensors", {n: a for n, a in arrays.items() if "language_model" in n})
    model = model_at(tmp_path)
    assert model.tower is None and "text only" in caplog.text
    del arrays[next(name for name in arrays if name.endswith("fc1.bias"))]
    safetensors.save(tmp_path / "model.safetensors", arrays)
    with pytest.raises(ModelError, match=r"vision.layers.\d.mlp.up_proj.bias of the vision tower is missing"):
        model_at(tmp_path)
