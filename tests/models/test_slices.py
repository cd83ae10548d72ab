"""`--slice`: a small model embedded in the first channels, heads and experts of a random model is extracted bit for
bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import read_raw
from support import family_of, make, model_at, prompt_of, request, run
from tiny_models import write_model, write_tiny

from headstart.cli.main import main
from headstart.formats import open_checkpoint, safetensors
from headstart.models.slices import sliced
from headstart.models.small import Arrays
from headstart.models.tensors import canonical_tensors, find_family, read_config

WIDE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8,
    "mamba_num_heads": 12, "mamba_head_dim": 20, "n_groups": 3, "n_routed_experts": 9, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 56, "moe_latent_size": 28,
}  # fmt: skip
"""Sizes of the large model; small: 48, 80, 6 heads of 2 groups, 6 Mamba heads of 16 in 2 groups, 7, 24, 40, 20."""
STATE = 12
PARTS: dict[str, tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], ...]] = {
    "q_proj": ([((3, 4, 8), (2, 3, 8))],),
    "k_proj": ([((3, 8), (2, 8))],),
    "v_proj": ([((3, 8), (2, 8))],),
    "o_proj": ([((64,), (48,))], [((3, 4, 8), (2, 3, 8))]),
    "in_proj": (
        [*[((3, 4, 20), (2, 3, 16))] * 2, *[((3, STATE), (2, STATE))] * 2, ((3, 4), (2, 3))],
    ),
    "conv1d": ([((3, 4, 20), (2, 3, 16)), *[((3, STATE), (2, STATE))] * 2],),
    "A_log": ([((3, 4), (2, 3))],), "D": ([((3, 4), (2, 3))],), "dt_bias": ([((3, 4), (2, 3))],),
    "mixer.norm": ([((3, 4, 20), (2, 3, 16))],),
    "out_proj": ([((64,), (48,))], [((3, 4, 20), (2, 3, 16))]),
    "eh_proj": ([((64,), (48,))], [((64,), (48,))] * 2),
}  # fmt: skip
"""Part of a name -> segments of its rows, of its columns, each as (levels in the large model, in the small one). Other
tensors take the first rows and columns."""


def belongs_to_slice(
    size: int, small: int, segments: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> np.ndarray[Any, Any]:
    """Whether each of `size` rows belongs to the small model."""
    if not segments:
        return np.arange(size) < small
    masks = []
    for whole, part in segments:
        inside = np.ones(whole, bool)
        for axis, count in enumerate(part):
            inside &= np.expand_dims(np.arange(whole[axis]) < count, [i for i in range(len(whole)) if i != axis])
        masks.append(inside.reshape(-1))
    return np.concatenate(masks)


def masks(name: str, whole: tuple[int, ...], part: tuple[int, ...]) -> tuple[Any, ...]:
    segments = next((rows for key, rows in PARTS.items() if f".{key}." in f".{name}." or f"{key}." in name), ())
    return np.ix_(*(
        belongs_to_slice(size, small, [*segments[axis]] if axis < len(segments) else [])
        for axis, (size, small) in enumerate(zip(whole, part, strict=True))
    ))  # fmt: skip


def write_models(folder: Path) -> tuple[Path, Path, Arrays]:
    """Folders of a small model and of a large model that embeds it, and the small model's arrays."""
    family = family_of("nemotron_h")
    config, small = family.tiny()
    wide_config, large = family.tiny(**WIDE)
    for name, array in small.items():
        large[name][masks(name, large[name].shape, array.shape)] = array
    return write_model(folder / "small", config, small), write_model(folder / "large", wide_config, large), small


def test_slice_equals_the_small_model(tmp_path: Path) -> None:
    small, large, arrays = write_models(tmp_path)
    cut = sliced(open_checkpoint(large), str(small))
    assert cut.tensors.keys() == arrays.keys() < open_checkpoint(large).tensors.keys()
    for name, array in arrays.items():
        assert np.array_equal(cut.tensors[name].float32(), array), name
    matrix = "backbone.layers.0.mixer.in_proj.weight"
    pieces = [cut.tensors[matrix].read_bytes(begin, 100) for begin in range(0, 4 * arrays[matrix].size, 100)]
    assert np.array_equal(np.concatenate(pieces).view(np.float32), arrays[matrix].reshape(-1))
    requests = [request(prompt_of(20, seed), name=str(seed), max_tokens=24, logprobs=3) for seed in range(2)]
    for backend in ("reference", "native"):
        found, expected = (
            run(make(model_at(path, backend, **more), depth=3, drafter="mtp", block_size=16), requests)
            for path, more in ((large, {"slice": str(small / "config.json")}), (small, {}))
        )
        assert found == expected
        assert sum(len(each.tokens) for each in found.values()) == 48
    assert run(make(model_at(large), depth=0), requests) != expected


def test_export_writes_the_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, large, _ = write_models(tmp_path)
    out = tmp_path / "out"
    assert main(["export", str(large), "--slice", str(small), "--out", str(out)]) == 0
    assert read_raw(out / "model.safetensors") == read_raw(small / "model.safetensors")
    assert json.loads((out / "config.json").read_text()) == json.loads((small / "config.json").read_text())
    assert (out / "tokenizer.json").read_bytes() == (small / "tokenizer.json").read_bytes()
    assert main(["export", str(large), "--slice", str(small), "--to", "gguf", "--out", str(tmp_path / "other")]) == 2
    assert main(["export", str(large), "--to", "slice", "--out", str(tmp_path / "other")]) == 2
    assert main(["verify", str(large), "--slice", str(small), "--against", "transformers"]) == 2
    errors = capsys.readouterr().err
    assert "give --slice" in errors and "headstart export --slice" in errors


def test_slice_may_omit_the_mtp_head(tmp_path: Path) -> None:
    small, large, _ = write_models(tmp_path)
    config = json.loads((small / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (small / "config.json").write_text(json.dumps(config))
    assert not any(name.startswith("mtp.") for name in sliced(open_checkpoint(large), str(small)).tensors)


def quantized(folder: Path, method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The large model with random FP8 or NVFP4 codes in two kinds of matrices, named as by ModelOpt."""
    changes = {"mamba_head_dim": 32, "hybrid_override_pattern": "M-", "num_hidden_layers": 2}
    config, arrays = family_of("nemotron_h").tiny(**{**WIDE, **changes, "num_nextn_predict_layers": 0})
    rng, stored = np.random.default_rng(3), dict[str, Any](arrays)
    for name in ("backbone.layers.0.mixer.out_proj", "backbone.layers.1.mixer.down_proj"):
        rows, columns = stored.pop(f"{name}.weight").shape
        narrow = columns // 2 if method == "NVFP4" else columns
        codes = rng.integers(0, 0x70, (rows, narrow)).astype(np.uint8)
        scale = rng.integers(0x30, 0x40, (rows, columns // 16)).astype(np.uint8), "F8_E4M3"
        stored[f"{name}.weight"] = codes if method == "NVFP4" else (codes, "F8_E4M3")
        stored[f"{name}.weight_scale"] = scale if method == "NVFP4" else np.array(0.5, np.float32)
        if method == "NVFP4":
            stored[f"{name}.weight_scale_2"] = np.array(0.25, np.float32)
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": method}
    return config, stored


@pytest.mark.parametrize("method", ["FP8", "NVFP4"])
def test_quantized_weights_are_sliced_with_their_scales(tmp_path: Path, method: str) -> None:
    config, stored = quantized(tmp_path, method)
    large = write_model(tmp_path / "large", config, {})
    safetensors.save(large / "model.safetensors", stored)
    less = {"hidden_size": 48, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "intermediate_size": 80}
    path = tmp_path / "part.json"
    path.write_text(json.dumps({key: value for key, value in {**config, **less}.items() if "quant" not in key}))

    def values(checkpoint: Any) -> dict[str, Any]:
        family = find_family(checkpoint)
        tensors = canonical_tensors(checkpoint, family, read_config(checkpoint, family))
        return {name: tensor.float32() for name, tensor in tensors.items()}

    whole, part = values(open_checkpoint(large)), values(sliced(open_checkpoint(large), str(path)))
    inside, matrix = belongs_to_slice(384, 128, [((3, 4, 32), (2, 4, 16))]), "layers.0.mamba.out_proj.weight"
    assert np.array_equal(part[matrix], whole[matrix][:48, inside])
    matrix = "layers.1.mlp.down_proj.weight"
    assert np.array_equal(part[matrix], whole[matrix][:48, :80])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 80}, "hidden_size is 80, the model's is 64"),
        ({"num_attention_heads": 15}, "num_attention_heads / num_key_value_heads is 5, the model's is 4"),
        ({"num_attention_heads": 7}, "7 query heads are no multiple of 3 kv heads"),
        ({"mamba_num_heads": 7}, "heads must be a multiple of groups"),
        ({"head_dim": 4}, "head_dim is 4, the model's is 8"),
        ({"vocab_size": 100}, "vocab_size is 100, the model's is 131"),
        ({"hybrid_override_pattern": "ME*"}, "its layers are of other kinds, or of another number"),
        ({"model_type": "llama"}, "model_type is 'llama', the model's is 'nemotron_h'"),
    ],
)
def test_invalid_slices_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    family = family_of("nemotron_h")
    large = write_model(tmp_path / "large", *family.tiny(**WIDE))
    path = tmp_path / "part.json"
    path.write_text(json.dumps(family.tiny_config(**{**WIDE, **changes})))
    assert main(["generate", str(large), "--slice", str(path), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert f"--slice: {path} is no slice of {large}" in error


def test_other_families_and_missing_configs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny("llama", tmp_path / "llama")
    assert main(["generate", str(model), "--slice", str(model), "--prompt", "a"]) == 2
    assert "--slice: llama models are not cut" in capsys.readouterr().err
    assert main(["generate", str(write_tiny("nemotron_h", tmp_path / "m")), "--slice", "12B", "--prompt", "a"]) == 2
    assert "--slice: 12B is not a file" in capsys.readouterr().err
