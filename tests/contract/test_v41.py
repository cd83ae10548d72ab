"""DeepSeek-V4.1: released tensors and keys, numbers of normalized tokens, refused configs.

test_families.py and test_v4_dspark.py compare logits."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from readings import token_map
from support import family_of, make, model_at, prompt_of, request, run
from test_v4_dspark import DSPARK_V41, write_tiny_checkpoint
from tiny_models import tiny_tokenizer, write_model
from tokenizers import Tokenizer, models

from headstart.errors import ModelError
from headstart.layers.ngram import primes_from
from headstart.models.deepseek_v41 import _factors
from headstart.text.normalized import normalized_numbers

FAMILY = "deepseek_v41"
FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [32, 32], "expert_dtype": "fp4",
    "activation_scheme": "dynamic",
}  # fmt: skip


MATRICES = (".wq_a", ".wq_b", ".wkv", ".wo_a", ".wo_b", "main_proj", ".w1", ".w2", ".w3")


def write_released(folder: Path) -> Path:
    """The tiny model with nested keys and image tensors, in FP8 with blocks of 32 x 32 (tables: of 32 columns), and FP4
    experts."""
    sizes = {"engram_head_dim": 64, "hidden_size": 64, "moe_intermediate_size": 32}
    config, arrays = family_of(FAMILY).tiny(**DSPARK_V41, **sizes)
    stored: dict[str, Any] = dict(arrays)
    for name, array in arrays.items():
        if ".experts." in name:
            half = (*array.shape[:-1], array.shape[1] // 2)
            stored[name] = (np.random.default_rng(0).integers(0, 256, half, np.uint8), "I8")
            scales = np.full((len(array), array.shape[1] // 32), 122, np.uint8)
            stored[name.replace("weight", "scale")] = (scales, "F8_E8M0")
        elif name.endswith((".embed.weight", *(f"{part}.weight" for part in MATRICES))) and "markov" not in name:
            rows = 1 if ".embed." in name else 32
            scales = np.full((-(-len(array) // rows), -(-array.shape[1] // 32)), 121, np.uint8)
            stored[name] = (np.clip(np.round(array * 64), 1, 120).astype(np.uint8), "F8_E4M3")
            stored[name.replace("weight", "scale")] = (scales, "F8_E8M0")
    for part in ("layers.1", "mtp.0"):
        stored[f"{part}.ffn.gate.bias_vl"] = np.zeros_like(arrays[f"{part}.ffn.gate.bias"])
    for name in ("vision.patch_embed.weight", "image_start"):
        stored[name] = np.zeros(4, np.float32)
    path = write_model(folder, config, stored)
    outer = {"model_type": FAMILY, "architectures": config.pop("architectures"), "quantization_config": FP8}
    outer |= {"text_config": config, "image_token_id": 7, "vision_config": {"model_type": "deepseek_v41_vision"}}
    (path / "config.json").write_text(json.dumps(outer))
    return path


def test_released_tensors_and_keys_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = model_at(write_released(tmp_path / "model"))
    assert "reads text only" in caplog.text and "does not have" not in caplog.text and model.head
    table = model.weights.tensors["layers.0.memory.embed_tokens.weight"]
    assert table.dtype.startswith("E4M3") and 0 < table.float32().min() < table.float32().max()
    texts = [request(prompt_of(20, 3), max_tokens=8, stops=())]
    assert run(make(model), texts)["r", 0].tokens == run(make(model, drafter="none"), texts)["r", 0].tokens


def test_normalized_token_numbers_match_the_reading() -> None:
    tokenizer = tiny_tokenizer(131)
    assert [*normalized_numbers(tokenizer)] == token_map(131)[: tokenizer.get_vocab_size()]
    words = ["the", " The", "THÉ", "\uff34HE", " ", "\n\n", "", "ß", "\ufffd"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    assert [*normalized_numbers(plain)] == [0, 0, 0, 0, 1, 1, 2, 3, 4]
    with pytest.raises(ModelError, match="88 different normalized tokens, but engram_compressed_vocab_size is 87"):
        model_at(write_tiny_checkpoint(FAMILY, engram_compressed_vocab_size=87))


def test_hash_sizes_and_factors_match_published_tables() -> None:
    sizes = primes_from(16_000_000, 48)
    assert [sum(sizes[:24]), sum(sizes[24:])] == [384006168, 384016682]  # engram_num_embeddings
    bound = (2**63 - 1) // 99092 // 2
    for layer in (1, 14):
        drawn = np.random.default_rng(10007 * layer).integers(low=0, high=bound, size=(4,), dtype=np.int64)
        assert _factors(layer, 4, 99092) == tuple((drawn * 2 + 1).tolist())


def test_plan_counts_shared_entries_once() -> None:
    family = family_of(FAMILY)
    sizes = family.read(family.tiny_config())
    mixers = [layer.mixer for layer in sizes.cost().layers]
    entry = mixers[1].kv_width + mixers[1].index_width  # two layers write entries, for 2 positions and for 1
    assert sum(each.cached(1002) - each.cached(1000) for each in mixers) == entry * (1 + 2)
    keys = [each.index_width > 0 and each.index_work > 0 for each in mixers]
    assert keys == [False, True, False, True, False, True]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"compress_ratios": [0, 2, 2, 1, 1, 4]}, "compress_ratios"),
    ({"compress_ratios": [0, 2, 2]}, "compress_ratios"),
    ({"compress_ratios": [0, 2, 2, 2, 1, 1], "candidate_source_layer_id": -1}, "layer 4 needs a layer before it"),
    ({"compress_ratios": [0, 2, 2, 1, 1, 0], "candidate_source_layer_id": -1}, "layer 5 selects"),
    ({"candidate_source_layer_id": 1}, "candidate_source_layer_id is 1"),  # another ratio
    ({"candidate_source_layer_id": 2}, "candidate_source_layer_id is 2"),  # selects no candidates
    ({"kv_source_layer_ids": [3]}, "layer 1 needs a layer before it"),
    ({"index_source_layer_ids": [1]}, "index_source_layer_ids"),
    ({"kv_source_layer_ids": [1, -1]}, "kv_source_layer_ids"),
    ({"engram_layer_ids": 1}, "engram_layer_ids"),
    ({"engram_num_embeddings": [1, 2]}, "engram_num_embeddings"),
    ({"engram_num_embeddings": 5}, "engram_num_embeddings"),
    ({"engram_n_heads": 10**6}, "engram_max_ngram_size"),
    ({"gate_temp": 2.0}, "gate_temp"),
    ({"engram_gate": 1}, "engram_gate"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG)
def test_unsupported_configs_are_refused(changes: dict[str, Any], said: str) -> None:
    family = family_of(FAMILY)
    with pytest.raises(ModelError, match=said):
        family.read(family.tiny_config(**changes))
