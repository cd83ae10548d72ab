"""Images of DeepSeek-V4-Flash-Vision-Exp and DeepSeek-V4.1: sizes, blocks, features and logits equal a reading of
public code; drafts keep the text."""

# ruff: noqa: RUF001  (the bars of DeepSeek's markers are U+FF5C)

import json
import re
from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import readings
import tokenizers
import torch
from gguf_files import written
from oracles import build_oracle, config_and_tensors
from readings import DeepseekV41
from support import family_of, make, model_at, new_folder, request, run
from test_converted_families import CONVERTED, GGUF_CHANGES, write_converted
from test_v4_dspark import KEYS
from tiny_models import tiny_tokenizer, write_model
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, pad, silu, softplus, unfold
from vision_models import copied, random_image

from headstart.core import Request, Sequence, Span
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.engine.vision import VisionEncoder
from headstart.errors import UsageError
from headstart.formats import open_checkpoint
from headstart.models import _clip
from headstart.models.small import Arrays
from headstart.text.image_blocks import BlockFormat
from headstart.text.normalized import normalized_numbers
from headstart.tools.inspect.run import runs_here

FAMILIES = ("deepseek_v4", "deepseek_v41")
BACKENDS = ("reference", "native")
MARKER = "<｜deepseek_image｜>"
TOWER = {
    "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40, "patch_size": 4,
    "rope_theta": 10000.0, "downsample_ratio": 3, "max_image_tokens": 48, "min_pixels": 900, "max_wh_ratio": 4,
}  # fmt: skip
V4_KEYS = {
    "num_hidden_layers": "n_layers", "hidden_size": "dim", "num_attention_heads": "n_heads",
    "intermediate_size": "inter_dim", "max_image_tokens": "max_n_token",
}  # fmt: skip
IMAGES = {1: random_image(1), 2: random_image(2, 90, 23), 3: random_image(3, 31, 64), 4: random_image(4, 5, 4)}
WINDOW = 11  # fewer positions than an image


def tower_arrays(hidden: int, has_pads: bool) -> dict[str, np.ndarray]:
    """Random tensors of the tower, under published names."""
    rng, wide = np.random.default_rng(5), TOWER["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj": (wide, 3 * TOWER["patch_size"] ** 2), "aligner.w1": (hidden, 9 * wide),
        "aligner.w2": (hidden, hidden),
    }  # fmt: skip
    for i in range(TOWER["num_hidden_layers"]):
        shapes |= {f"vision.blocks.{i}.attn.wqkv": (3 * wide, wide), f"vision.blocks.{i}.attn.wo": (wide, wide)}
    arrays = {f"{name}.bias": rng.normal(0, 0.1, shape[0]) for name, shape in shapes.items()}
    for i in range(TOWER["num_hidden_layers"]):
        shapes[f"vision.blocks.{i}.mlp.w1"] = (2 * TOWER["intermediate_size"], wide)
        shapes[f"vision.blocks.{i}.mlp.w2"] = (wide, TOWER["intermediate_size"])
        arrays |= {f"vision.blocks.{i}.norm{j}.weight": 1 + rng.normal(0, 0.1, wide) for j in (1, 2)}
    arrays |= {f"{name}.weight": rng.normal(0, shape[1] ** -0.5, shape) for name, shape in shapes.items()}
    arrays["vision.norm.weight"] = 1 + rng.normal(0, 0.1, wide)
    learned = ("start", "end", "newline", *(["pad"] if has_pads else []))
    arrays |= {f"image_{name}": rng.normal(0, 0.5, hidden) for name in learned}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def marked_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tiny_tokenizer(131)
    tokenizer.add_special_tokens([MARKER])
    return tokenizer


@cache
def published(family: str, **changes: Any) -> Path:
    """A tiny model with a tower, router biases for images in all layers and a DSpark drafter."""
    tokenizer, numbers = marked_tokenizer(), dict[str, int]()
    if family == "deepseek_v41":
        numbers["engram_compressed_vocab_size"] = int(max(normalized_numbers(tokenizer))) + 1
    config, arrays = family_of(family).tiny(**{**KEYS[family], "sliding_window": WINDOW, **numbers, **changes})
    arrays = {**arrays, **tower_arrays(config["hidden_size"], family == "deepseek_v4")}
    rng = np.random.default_rng(6)
    for name in [each for each in arrays if each.endswith(".ffn.gate.weight")]:
        count = len(arrays[name])
        arrays[name.replace("weight", "bias_vl")] = rng.normal(0, 1, count).astype(np.float32)
    if family == "deepseek_v4":
        config |= {f"vision_{V4_KEYS.get(name, name)}": each for name, each in TOWER.items()}
    else:
        outer = {"model_type": family, "architectures": config.pop("architectures"), "text_config": config}
        config = {**outer, "vision_config": TOWER, "vocab_size": config["vocab_size"]}
    folder = write_model(new_folder(), config, arrays)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@cache
def load_vision_model(family: str, backend: str, dtype: str = "float32") -> Model:
    settings: dict[str, Any] = {"kv_cache_dtype": "float32"} if backend == "native" else {}
    return model_at(published(family), backend, dtype, **settings)


def engine_of(model: Model, **settings: Any) -> Engine:
    kept = "float32" if model.backend.name == "native" else None
    common = {"backend": model.backend.name, "dtype": "float32", "block_size": 16, "kv_cache_dtype": kept}
    return make(model, **{**common, **settings})


def arrays_of(family: str) -> dict[str, Tensor]:
    found = open_checkpoint(published(family)).tensors
    return {name: torch.tensor(tensor.float32()).double() for name, tensor in found.items()}


def request_with_images(model: Model, seeds: Seq[int], text: str = "What is on it?", **params: Any) -> Request:
    assert model.image_processor, model.no_tower
    marked = "".join(f"ab{'c' * i}{MARKER}" for i in range(len(seeds))) + text
    prepared = [model.image_processor.prepare(IMAGES[seed]) for seed in seeds]
    ids, images = model.image_processor.expand(model.tokenizer.encode(marked), prepared)
    return replace(request(ids, **params), images=images)


# The tower after DeepSeek's inference/vision.py (as in llama.cpp's tools/mtmd/models/deepseek4v.cpp).


def features_of(arrays: dict[str, Tensor], patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """Patches [P, 3 * side^2] in row order -> tokens [T, H]."""
    heads, eps = TOWER["num_attention_heads"], 1e-6

    def matrix(name: str, x: Tensor) -> Tensor:
        return linear(x, arrays[f"{name}.weight"], arrays.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * arrays[f"{name}.weight"]

    x = matrix("vision.patch_embed.proj", patches)
    quarter = x.shape[1] // heads // 4
    frequencies = TOWER["rope_theta"] ** (-torch.arange(quarter).double() / quarter)
    rows, columns = torch.arange(len(x)) // grid[1], torch.arange(len(x)) % grid[1]
    angles = torch.cat((rows[:, None] * frequencies, columns[:, None] * frequencies), 1)[:, None]

    def rotate(each: Tensor) -> Tensor:
        a, b = each.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    for i in range(TOWER["num_hidden_layers"]):
        at = f"vision.blocks.{i}"
        q, k, v = (
            each.unflatten(-1, (heads, -1)) for each in matrix(f"{at}.attn.wqkv", norm(f"{at}.norm1", x)).chunk(3, -1)
        )
        scores = torch.einsum("qhd,khd->hqk", rotate(q), rotate(k)) * q.shape[-1] ** -0.5
        x = x + matrix(f"{at}.attn.wo", torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
        gate, up = matrix(f"{at}.mlp.w1", norm(f"{at}.norm2", x)).chunk(2, -1)
        x = x + matrix(f"{at}.mlp.w2", silu(gate) * up)
    plane = norm("vision.norm", x).unflatten(0, grid).permute(2, 0, 1)[None]
    side = TOWER["downsample_ratio"]
    joined = unfold(pad(plane, (0, -grid[1] % side, 0, -grid[0] % side)), side, stride=side)[0].T
    return matrix("aligner.w2", gelu(matrix("aligner.w1", joined)))


def block_of(arrays: dict[str, Tensor], tokens: Tensor, grid: tuple[int, int], position: int, paired: bool) -> Tensor:
    """Rows of a block that begins at `position`, with its leading pads (V4)."""
    start, end, newline = (arrays[f"image_{name}"] for name in ("start", "end", "newline"))
    lines = [[*line, newline] for line in tokens.unflatten(0, grid)]
    if not paired:
        return torch.stack([start, *(each for line in lines for each in line), end])
    blank = arrays["image_pad"]
    lines += [[blank] * (grid[1] + 1)] * (len(lines) % 2)
    pairs = [each for upper, lower in zip(lines[::2], lines[1::2], strict=True)
             for both in zip(upper, lower, strict=True) for each in both]  # fmt: skip
    return torch.stack([*[blank] * (3 - position % 4), start, *pairs, *[blank] * (-len(pairs) % 4), end])


def patches_in_row_order(image: Any) -> Tensor:
    """Patches of an ImageInput in row order."""
    side, (height, width) = TOWER["downsample_ratio"], image.patch_grid
    places = [(r, c) for R in range(image.grid[0]) for C in range(image.grid[1])
              for r in range(side * R, side * R + side) for c in range(side * C, side * C + side)
              if r < height and c < width]  # fmt: skip
    order = np.argsort([row * width + column for row, column in places])
    return torch.tensor(image.patches[order]).double()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_image_features_match_the_reading(family: str, backend: str) -> None:
    model, arrays, paired = load_vision_model(family, backend), arrays_of(family), family == "deepseek_v4"
    assert model.vision and model.image_processor, model.no_tower
    encoder, partial_tokens = VisionEncoder(model.backend, model.vision), 0
    for image in [*IMAGES.values(), random_image(5, 200, 200), random_image(6, 333, 7), random_image(7, 7, 333)]:
        (piece,) = model.image_processor.prepare(image).pieces
        prepared = piece.image
        partial_tokens += any(count % 3 for count in prepared.patch_grid)
        tokens = features_of(arrays, patches_in_row_order(prepared), prepared.patch_grid)
        expected = block_of(arrays, tokens, prepared.grid, 0, paired)
        assert piece.count == len(expected) <= TOWER["max_image_tokens"]
        np.testing.assert_allclose(encoder.features(prepared), expected.numpy(), rtol=2e-4, atol=2e-4)
    assert partial_tokens > 2


SIZES = [(384, 384, 392, 392), (16, 16, 392, 392), (700, 100, 1022, 154), (800, 100, 1092, 140), (900, 100, 1092, 140),
         (100, 700, 154, 1022), (350, 490, 350, 490)]  # fmt: skip
SIZES_V41 = [(1024, 1024, 1036, 1036), (4000, 500, 3696, 462), (500, 4000, 420, 3360), (320, 200, 700, 434),
             (1920, 1080, 1708, 966), (1, 10000, 42, 21462), (10000, 1, 42882, 42)]  # fmt: skip
"""Width and height of images, and of these resized, by llama.cpp."""


def test_image_sizes_and_blocks_match_llama_cpp() -> None:
    v4 = BlockFormat(max_rows=384, paired=True, max_ratio=8)
    v41 = BlockFormat(max_rows=1024, paired=False)
    for width, height, *expected in SIZES:
        assert v4.size_of(width, height, min_pixels=147456, patch=14, merge=3) == tuple(expected)
    for width, height, *expected in SIZES_V41:
        assert v41.size_of(width, height, min_pixels=295936, patch=14, merge=3) == tuple(expected)
    for width, height in [(3000, 2000), (5000, 5000), (20, 9000), (9000, 20)]:
        size = v4.size_of(width, height, min_pixels=147456, patch=14, merge=3)
        assert len(v4.order((-(-size[1] // 42), -(-size[0] // 42)))) <= 384
    assert v41.order((2, 3)).tolist() == [6, 0, 1, 2, 8, 3, 4, 5, 8, 7]
    assert [v4.leading_at(position) for position in range(5)] == [3, 2, 1, 0, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_padded_with_gray(family: str) -> None:
    model = load_vision_model(family, "reference")
    assert model.image_processor
    (wide,) = model.image_processor.prepare(
        random_image(1, 100, 23)
    ).pieces  # four times as wide as high, so it is squeezed
    (other,) = model.image_processor.prepare(random_image(1, 57, 33)).pieces
    edges = [patches_in_row_order(each.image).unflatten(0, each.image.patch_grid) for each in (wide, other)]
    gray = [(each - (127 / 255 - 0.5) / 0.5).abs().amax(-1) < 1e-6 for each in edges]
    assert not gray[0].any() and other.image.patch_grid == (9, 15)


# Logits of transformers' DeepSeek-V4 and of the reading of V4.1, extended by DeepSeek's inference/model.py for images.


def features_in(model: Model, family: str, one: Request) -> Iterator[tuple[int, Tensor]]:
    """First position and rows of each image."""
    arrays, before = arrays_of(family), None
    for placed in one.images:
        image = placed.image
        if before is None or before.image is not image or before.end != placed.first:  # else it follows its own pads
            tokens = features_of(arrays, patches_in_row_order(image), image.patch_grid)
            yield placed.first, block_of(arrays, tokens, image.grid, placed.first, family == "deepseek_v4")
        before = placed


class DeepseekV41WithImages(DeepseekV41):
    """Image rows get no n-gram memory, and n-grams restart after an image; attention is that of text."""

    images: list[tuple[int, Tensor]]

    @property
    def image_rows(self) -> list[int]:
        return [first + i for first, rows in self.images for i in range(len(rows))]

    def embed(self, tokens: Tensor) -> Tensor:
        x = super().embed(tokens).clone()
        for first, rows in self.images:
            x[first : first + len(rows)] = rows
        return x

    def router_bias(self, at: str) -> Tensor:
        if at.startswith("mtp."):
            return super().router_bias(at)
        found = super().router_bias(at).repeat(self.length, 1)
        found[self.image_rows] = self.arrays[f"{at}.gate.bias_vl"]
        return found

    def trunk(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        self.length = len(tokens)
        return super().trunk(tokens)

    def memory(self, layer: int, x: Tensor, tokens: Tensor) -> Tensor:
        found, begin = x.clone(), 0
        for first, rows in [*self.images, (len(x), x[:0])]:
            if first > begin:
                found[begin:first] = super().memory(layer, x[begin:first], tokens[begin:first])
            begin = first + len(rows)
        return found


def logits_v4(model: Model, tokens: Tensor, images: list[tuple[int, Tensor]]) -> Tensor:
    config, tensors = config_and_tensors("deepseek_v4", model)
    config = {key: each for key, each in config.items() if not key.startswith(("vision_", "dspark_"))}
    count = config["num_hidden_layers"]
    oracle, missing, _ = build_oracle("deepseek_v4", {**config, "compress_ratios": config["compress_ratios"][:count]},
                                      {name: each.double() for name, each in tensors.items()})  # fmt: skip
    assert not missing
    oracle = oracle.double()
    is_image = torch.zeros(len(tokens), dtype=torch.bool)
    rows = torch.arange(len(tokens))
    start, end = rows.clone(), rows.clone()
    for first, block in images:
        is_image[first : first + len(block)] = True
        begin = first + 3 - first % 4
        start[begin : first + len(block)], end[begin : first + len(block)] = begin, first + len(block) - 1
    seen = (rows >= torch.minimum(rows - WINDOW + 1, start)[:, None]) & (rows <= end[:, None])
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)[None, None]

    def fill(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        output = output.clone()
        for first, block in images:
            output[0, first : first + len(block)] = block
        return output

    def routed(gate: Any, bias: Tensor) -> Any:
        usual = gate.forward

        def forward(hidden: Tensor, *ids: Tensor) -> Any:
            logits, weights, chosen = usual(hidden, *ids)
            scores = softplus(logits).sqrt()
            ours = (scores + bias).topk(gate.top_k).indices
            shares = scores.gather(1, ours) / scores.gather(1, ours).sum(-1, keepdim=True) * gate.routed_scaling_factor
            return logits, weights.where(~is_image[:, None], shares), chosen.where(~is_image[:, None], ours)

        return forward

    oracle.model.embed_tokens.register_forward_hook(fill)
    for i, layer in enumerate(oracle.model.layers):
        layer.mlp.gate.forward = routed(layer.mlp.gate, tensors[f"layers.{i}.ffn.gate.bias_vl"].double())
    return oracle(tokens[None], attention_mask={"sliding_attention": mask}, use_cache=False).logits[0]


def expected_logits(family: str, model: Model, one: Request, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Logits [T, V] of the prompt of a request."""
    tokens, images = torch.tensor(one.prompt_ids), [*features_in(model, family, one)]
    if family == "deepseek_v4":
        return logits_v4(model, tokens, images)
    text = json.loads((published(family) / "config.json").read_text())["text_config"]
    numbers = [*normalized_numbers(marked_tokenizer())]
    monkeypatch.setattr(readings, "token_map", lambda vocab: numbers + [0] * (vocab - len(numbers)))
    reading = DeepseekV41WithImages(text)
    reading.arrays, reading.images = arrays_of(family), images
    return reading.logits(reading.trunk(tokens)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_the_reading(family: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_vision_model(family, backend)
    engine = engine_of(model, drafter="none", kv_blocks=32, max_model_len=256)
    one = request_with_images(model, [1, 2, 4])
    with torch.inference_mode():
        expected = expected_logits(family, model, one, monkeypatch)
    sequence = Sequence(replace(one, params=replace(one.params, prompt_logprobs=0)), 0, list(one.prompt_ids), 0)
    assert engine.memory.reserve(sequence, len(sequence.tokens))
    logits = model.backend.numpy(engine.runner.forward([Span(sequence, 0, len(sequence.tokens), 1)]).logits)
    np.testing.assert_allclose(logits, expected.numpy(), rtol=3e-3, atol=3e-3)
    engine.memory.release(sequence)


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_independent_of_the_batch(family: str) -> None:
    model = load_vision_model(family, "native")
    cases = [([1], "What?", 0.0), ([2], "What?", 0.8), ([1, 4], "Hm?", 0.0), ([], "no image at all", 0.9)]
    requests = [
        request_with_images(model, seeds, text, name=str(i), max_tokens=20, temperature=temperature, ignore_eos=True)
        for i, (seeds, text, temperature) in enumerate(cases)
    ]

    def texts(**more: Any) -> dict[Any, list[int]]:
        found = run(engine_of(model, **more), requests)
        return {key: each.tokens for key, each in found.items()}

    alone = texts(max_num_seqs=1, kv_blocks=16, drafter="none", enable_prefix_caching=False)
    assert texts(max_num_seqs=8, drafter="block", depth=3) == alone
    assert texts(max_num_seqs=8, drafter="ngram", depth=3) == alone
    for budget in (5, 19, 24):  # smaller than an image, so images are cut
        assert texts(max_num_batched_tokens=budget, drafter="block", depth=2) == alone
    engine = engine_of(model, max_num_seqs=4, kv_blocks=9, drafter="block", depth=2)
    for _ in range(2):  # the second turn uses the prefix cache
        assert {key: each.tokens for key, each in run(engine, requests).items()} == alone
    assert engine.scheduler.prefix_hits and engine.stats.drafted > 20


def write_projector(path: Path, arrays: Arrays) -> None:
    """Writes the tower as llama.cpp's converter (conversion/deepseek.py, DeepseekV4FlashVisionModel)."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_projector_type("deepseek4v")
    writer.add_vision_use_silu(True)
    writer.add_vision_projector_scale_factor(TOWER["downsample_ratio"])
    writer.add_vision_min_pixels(TOWER["min_pixels"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    for name, key in _clip.KEYS.items():
        if key in TOWER:
            writer.add_uint32(f"clip.vision.{name}", TOWER[key])
    names = {
        r"^vision\.blocks\.": "v.blk.", r"^vision\.patch_embed\.proj": "v.patch_embd", r"^vision\.norm": "v.post_ln",
        r"^aligner\.w": "mm.", r"^image_newline": "v.image_newline", r"^image_": "v.token_embd.img_",
        r"\.norm": ".ln", r"\.attn\.wqkv": ".attn_qkv", r"\.attn\.wo": ".attn_out", r"\.mlp\.w2": ".ffn_down",
    }  # fmt: skip
    for name, array in arrays.items():
        new = reduce(lambda text, each: re.sub(*each, text), names.items(), name)
        if ".mlp.w1" in new:
            for part, each in zip(("gate", "up"), np.split(array, 2), strict=True):
                writer.add_tensor(new.replace(".mlp.w1", f".ffn_{part}"), each)
        else:
            side = TOWER["patch_size"]
            writer.add_tensor(new, array.reshape(-1, 3, side, side) if new == "v.patch_embd.weight" else array)
    written(writer, path)


def test_projector_and_text_files_of_llama_cpp_equal_the_checkpoint(tmp_path: Path) -> None:
    changes = {**GGUF_CHANGES["deepseek_v4"], "dspark_block_size": None}
    folder = published("deepseek_v4", **changes)
    plain, config = model_at(folder), json.loads((folder / "config.json").read_text())
    arrays = {name: each.float32() for name, each in open_checkpoint(folder).tensors.items()}
    tower = {name: arrays.pop(name) for name in [*arrays] if name.startswith(("vision.", "aligner.", "image_"))}
    biases = {name: arrays.pop(name) for name in [*arrays] if name.endswith(".bias_vl")}
    how = CONVERTED["deepseek_v4"]
    more = {f"blk.{i}.exp_probs_b_vl.bias": biases[f"layers.{i}.ffn.gate.bias_vl"] for i in range(3)}
    how = replace(how, renamed=lambda arrays, config, of=how.renamed: of(arrays, config) | more)
    write_projector(tmp_path / "mmproj-F32.gguf", tower)
    found = model_at(write_converted(tmp_path / "model.gguf", config, arrays, how))
    assert found.vision and plain.vision, found.no_tower
    one = request_with_images(plain, [1, 2], max_tokens=12, ignore_eos=True)
    features = [VisionEncoder(each.backend, each.vision).features(one.images[0].image) for each in (plain, found)]
    np.testing.assert_allclose(*features, rtol=1e-5, atol=1e-5)
    texts = [run(engine_of(each, drafter="ngram"), [one])["r", 0].tokens for each in (plain, found)]
    assert texts[0] == texts[1]
    assert found.image_processor and found.image_processor.max_patches == 384 * 9


@pytest.mark.parametrize("family", FAMILIES)
def test_model_without_image_tensors_reads_text_only(family: str, tmp_path: Path) -> None:
    assert runs_here(open_checkpoint(published(family)))["vision"] == {"layers": 2, "tokens": 48}
    for without, message in {
        "layers.1.ffn.gate.bias_vl": "tensor layers.1.ffn.gate.bias_vl, which images need, is missing",
        "vision.blocks.1.mlp.w1": "tensor vision.blocks.1.mlp.w1.weight of the vision tower is missing",
        "image_newline": "tensor image_newline of the vision tower is missing",
    }.items():
        (folder := tmp_path / without).mkdir()
        copied(published(family), folder, without)
        model = model_at(folder)
        assert model.image_processor is None and message in model.no_tower


def test_unsupported_image_preparation_is_refused(tmp_path: Path) -> None:
    copied(published("deepseek_v41"), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4] * 3}))
    assert "image_mean is [0.4, 0.4, 0.4]" in model_at(tmp_path).no_tower
    processor = load_vision_model("deepseek_v41", "reference").image_processor
    assert processor
    with pytest.raises(UsageError, match="has 0 placeholders"):
        processor.expand([5, 6], [processor.prepare(IMAGES[1])])
