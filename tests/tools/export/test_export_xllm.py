"""`headstart export --to xllm`: names, bytes and config keys of each model type, against handwritten tables."""

import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import Raw, raw, read_raw, tensor, write_checkpoint

from headstart.cli.main import main
from headstart.errors import ModelError
from headstart.formats.safetensors import Array
from headstart.tools.export.run import ExportOptions, run

Capture = pytest.CaptureFixture[str]
H, V, F = 8, 12, 16  # hidden size, vocabulary, inner size
SHARD = "mtp_layer_parameters.safetensors"


def of(prefix: str, *names: str, **shapes: tuple[int, ...]) -> dict[str, Array]:
    """bfloat16 tensors, vectors of H unless a shape is given. Two underscores in a keyword stand for a dot."""
    all_shapes = dict.fromkeys(names, (H,)) | {name.replace("__", "."): s for name, s in shapes.items()}
    return {
        f"{prefix}{name}.weight": tensor("BF16", *shape, seed=i) for i, (name, shape) in enumerate(all_shapes.items())
    }


TRUNK = of("model.", "norm", embed_tokens=(V, H)) | of("", lm_head=(V, H))
TRUNK |= of("model.layers.0.", "input_layernorm", self_attn__q_proj=(H, H))
LINK = of("", "enorm", "hnorm", "shared_head.norm", eh_proj=(H, 2 * H))
COPIES = of("", embed_tokens=(V, H), shared_head__head=(V, H))
BLOCK = of("", "input_layernorm", "post_attention_layernorm", self_attn__q_a_proj=(4, H), self_attn__o_proj=(H, H))
MOE = of("", mlp__gate=(2, H)) | {"mlp.gate.e_score_correction_bias": tensor("F32", 2)}
for expert in range(2):
    MOE |= of(f"mlp.experts.{expert}.", gate_proj=(F, H), up_proj=(F, H), down_proj=(H, F))
INDEXER = of("self_attn.indexer.", wq_b=(4, 4), wk=(4, H)) | {"self_attn.indexer.k_norm.bias": tensor("F32", 4)}
FC = of("", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", fc=(H, 2 * H))
DENSE = of("layers.0.", "input_layernorm", self_attn__q_proj=(2 * H, H), mlp__gate_proj=(F, H))
SECOND = {name.replace("layers.0.", "layers.1."): array for name, array in DENSE.items()}
MIMO = of("", "token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", input_proj=(H, 2 * H))
V4 = of("", "enorm", "hnorm", "norm", "attn_norm", e_proj=(H, H), h_proj=(H, H), ffn__gate=(2, H))
V4 |= {"hc_head_scale": tensor("F32", 4), "hc_attn_scale": tensor("F32", 3), "attn.attn_sink": tensor("F32", 2)}


def under(prefix: str, tensors: dict[str, Array]) -> dict[str, Array]:
    return {prefix + name: array for name, array in tensors.items()}


TRAILING = {**LINK, **COPIES, **BLOCK, **MOE}
TRAILING_DRAFT = {**under("model.", {**LINK, **COPIES}), **under("model.layers.0.", {**BLOCK, **MOE})}
DEEPSEEK = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 1, "hidden_size": H,
    "num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "n_routed_experts": 2, "vocab_size": V,
}  # fmt: skip
SPARSE = {"index_n_heads": 2, "index_head_dim": 4, "index_topk": 8}
QWEN_TEXT = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 1, "mtp_num_hidden_layers": 1, "layer_types": ["linear"],
}  # fmt: skip
QWEN = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": QWEN_TEXT}
QWEN_TRUNK = {**of("model.language_model.", "norm", embed_tokens=(V, H)), **of("", lm_head=(V, H))}
QWEN_SHARED = {name: array for name, array in QWEN_TRUNK.items() if "norm" not in name}
DONE = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, "quantization_config": "", "first_k_dense_replace": 0}


def kept(config: dict[str, Any], model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {**config, **DONE, "model_type": model_type, "architectures": [architecture], **changes}


def trailing(module: dict[str, Array]) -> dict[str, Array]:
    """Tensors of a one-layer trunk followed by a module as layer 1."""
    return {**TRUNK, **under("model.layers.1.", module)}


CASES: dict[str, tuple[dict[str, Any], dict[str, Array], dict[str, Array], dict[str, Any]]] = {
    "deepseek_v3": (
        DEEPSEEK, trailing(TRAILING), TRAILING_DRAFT, kept(DEEPSEEK, "deepseek_v3_mtp", "DeepseekMTPForCausalLM")),
    "kimi, without copies": (
        {**DEEPSEEK, "model_type": "kimi_k2"},
        {**trailing({**LINK, **BLOCK, **MOE}), "rot.weight": tensor("BF16", H, H)},
        {**under("model.", {**LINK, "rot.weight": tensor("BF16", H, H)}), **under("model.layers.0.", {**BLOCK, **MOE})},
        kept(DEEPSEEK, "deepseek_v3_mtp", "DeepseekMTPForCausalLM")),
    "deepseek_v32": (
        {**DEEPSEEK, **SPARSE},
        trailing({**TRAILING, **INDEXER}),
        {**TRAILING_DRAFT, **under("model.layers.0.", INDEXER)},
        kept({**DEEPSEEK, **SPARSE}, "deepseek_v32_mtp", "DeepseekV32MtpForCausalLM")),
    "glm_moe_dsa": (
        {
            **DEEPSEEK, **SPARSE, "model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"],
            "index_share_for_mtp_iteration": True, "index_topk_freq": 1, "indexer_types": ["full", "shared"]},
        trailing({**TRAILING, **INDEXER}),
        {**TRAILING_DRAFT, **under("model.layers.0.", INDEXER)},
        kept({**DEEPSEEK, **SPARSE}, "glm_moe_dsa_mtp", "GlmMoeDsaMtpForCausalLM", index_share_for_mtp_iteration=True,
             index_topk_freq=2, indexer_types=["full"])),
    "glm4_moe": (
        {**DEEPSEEK, "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]},
        trailing(TRAILING), TRAILING_DRAFT, kept(DEEPSEEK, "glm4_moe_mtp", "Glm4MoeMtpForCausalLM")),
    "deepseek_v4": (
        {**DEEPSEEK, "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "num_hash_layers": 3},
        {"embed.weight": tensor("BF16", V, H), **under("mtp.0.", V4)},
        under("model.layers.0.", V4),
        kept(DEEPSEEK, "deepseek_v4_mtp", "DeepseekV4MtpForCausalLM", num_hash_layers=0)),
    "mimo": (
        {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_hidden_layers": 1,
         "num_nextn_predict_layers": 1},
        {**TRUNK, **under("model.mtp_layers.0.", MIMO)},
        under("model.mtp_layers.0.", MIMO),
        kept({}, "mimo_mtp", "MiMoMtpForCausalLM")),
    "qwen3_5": (
        QWEN,
        {**QWEN_TRUNK, **under("mtp.", {**FC, **DENSE})},
        {**QWEN_SHARED, **under("mtp.", {**FC, **DENSE})},
        kept({}, "qwen3_5_mtp", "Qwen3_5MtpForCausalLM", mtp_num_hidden_layers=1,
             text_config={**QWEN_TEXT, "layer_types": ["full_attention"]})),
    "qwen3_5, tied, two layers": (
        {**QWEN, "tie_word_embeddings": True, "text_config": {**QWEN_TEXT, "mtp_num_hidden_layers": 2}},
        {**of("model.language_model.", embed_tokens=(V, H)), **under("model.mtp.", {**FC, **DENSE, **SECOND})},
        {**of("model.language_model.", embed_tokens=(V, H)), **under("model.mtp.", {**FC, **DENSE, **SECOND})},
        kept({}, "qwen3_5_mtp", "Qwen3_5MtpForCausalLM", tie_word_embeddings=True, mtp_num_hidden_layers=2,
             num_hidden_layers=2, num_nextn_predict_layers=2,
             text_config={**QWEN_TEXT, "num_hidden_layers": 2, "mtp_num_hidden_layers": 2,
                          "layer_types": ["full_attention"] * 2})),
    "qwen3_5_moe": (
        {**QWEN, "model_type": "qwen3_5_moe", "text_config": {**QWEN_TEXT, "num_experts": 2}},
        {**QWEN_TRUNK, **under("mtp.", {**FC, **DENSE, **under("layers.0.", MOE)})},
        {**QWEN_SHARED, **under("mtp.", {**FC, **DENSE, **under("layers.0.", MOE)})},
        kept({}, "qwen3_5_moe_mtp", "Qwen3_5MtpForCausalLM", mtp_num_hidden_layers=1,
             text_config={**QWEN_TEXT, "num_experts": 2, "layer_types": ["full_attention"]})),
}  # fmt: skip


def export(source: Path, out: Path, **options: Any) -> tuple[dict[str, Raw], dict[str, Any], list[str]]:
    """Tensors, config and notes of an export."""
    report = run(ExportOptions(model=str(source), out=out, **options))
    return read_raw(out / SHARD), json.loads((out / "config.json").read_text()), report.data["notes"]


@pytest.mark.parametrize("case", CASES)
def test_each_model_type_is_exported_tensor_by_tensor(case: str, tmp_path: Path) -> None:
    config, tensors, draft, expected = CASES[case]
    source = write_checkpoint(tmp_path / "model", {**config, "mine": "ü"}, tensors)
    found, written, _ = export(source, tmp_path / "out")
    assert found == {name: raw(array) for name, array in draft.items()}
    assert written == {**config, **expected, "mine": "ü"}
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {SHARD, "config.json", "tokenizer.json", "model.safetensors.index.json"}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {"weight_map": dict.fromkeys(draft, SHARD)}
    # Keys are sorted, indented by two, without escapes and without a final newline.
    text = (tmp_path / "out" / "config.json").read_text()
    assert text == json.dumps(written, indent=2, ensure_ascii=False, sort_keys=True)


@pytest.mark.parametrize(("case", "forced"), [("qwen3_5", "qwen3_5_moe"), ("qwen3_5_moe", "qwen3_5")])
def test_model_type_that_contradicts_the_tensors_is_refused(case: str, forced: str, tmp_path: Path) -> None:
    config, tensors, *_ = CASES[case]
    source = write_checkpoint(tmp_path / "model", config, tensors)
    with pytest.raises(ModelError, match=f"--model-type {forced}, but the tensors of .* are those of {case}"):
        run(ExportOptions(model=str(source), out=tmp_path / "out", model_type=forced))
    assert not (tmp_path / "out").exists()


def to_bfloat16(values: np.ndarray) -> bytes:
    return torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.uint16).numpy().tobytes()


def blocks(codes: np.ndarray, scales: np.ndarray, size: tuple[int, int]) -> bytes:
    """codes * scales in bfloat16, with PyTorch's FP8."""
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    rows, columns = codes.shape
    return to_bfloat16(values * scales.repeat(size[0], 0).repeat(size[1], 1)[:rows, :columns])


def fp8_module(rows: int, columns: int, scale: str, *shape: int) -> tuple[dict[str, Array], np.ndarray, np.ndarray]:
    """A module with one FP8 matrix whose scales are in an earlier shard; its codes and scales."""
    codes, scales = tensor("F8_E4M3", rows, columns), np.abs(tensor("F32", *shape)) + np.float32(0.1)
    module = {f"self_attn.q_a_proj.{scale}": scales, **TRAILING, "self_attn.q_a_proj.weight": codes}
    return trailing(module), codes[0], scales


@pytest.mark.parametrize("columns", [128, 200])
def test_fp8_blocks_become_bfloat16(tmp_path: Path, columns: int) -> None:
    module, codes, scales = fp8_module(130, columns, "weight_scale_inv", 2, math.ceil(columns / 128))
    write_checkpoint(tmp_path / "model", DEEPSEEK, module)
    found, _, notes = export(tmp_path / "model", tmp_path / "out")
    name = "model.layers.0.self_attn.q_a_proj.weight"
    assert found.pop(name) == ("BF16", (130, columns), blocks(codes, scales, (128, 128)))
    assert found == {n: raw(array) for n, array in TRAILING_DRAFT.items() if n != name} and notes == []


DIFFERENT_FROM_XLLM = {
    "blocks of an unknown model type": ("glm4_moe", "weight_scale_inv", (2, 2), (128, 128), {}),
    "channels": ("glm4_moe", "weight_scale", (130, 1), (1, 200), {}),
    "channels, where blocks are declared": (
        "deepseek_v3", "weight_scale", (130, 1), (1, 200), {"weight_block_size": [128, 128]}),
    "one scale": ("glm4_moe", "weight_scale", (1,), (130, 200), {}),
    "blocks of another size": ("deepseek_v3", "weight_scale_inv", (3, 4), (64, 64), {"weight_block_size": [64, 64]}),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT_FROM_XLLM)
def test_fp8_that_xllms_tool_copies_without_scales_is_dequantized(tmp_path: Path, case: str) -> None:
    model_type, ending, shape, size, quantization = DIFFERENT_FROM_XLLM[case]
    module, codes, scales = fp8_module(130, 200, ending, *shape)
    config = {**DEEPSEEK, "model_type": model_type, "architectures": None, "quantization_config": quantization}
    write_checkpoint(tmp_path / "model", config, module)
    found, _, notes = export(tmp_path / "model", tmp_path / "out")
    expected = blocks(codes, scales.reshape(-(-130 // size[0]), -1), size)
    assert found["model.layers.0.self_attn.q_a_proj.weight"] == ("BF16", (130, 200), expected)
    assert not [name for name in found if "scale" in name]
    assert bool(notes) == (model_type == "glm4_moe" or ending == "weight_scale")


def test_fp4_experts_with_power_of_two_scales_become_bfloat16(tmp_path: Path) -> None:
    config, tensors, *_ = CASES["deepseek_v4"]
    packed, scale = tensor("I8", 3, 32), tensor("F8_E8M0", 3, 2)
    expert = {"mtp.0.ffn.experts.0.w1.weight": packed, "mtp.0.ffn.experts.0.w1.scale": scale}
    write_checkpoint(tmp_path / "model", {**config, "n_routed_experts": 1}, {**tensors, **expert})
    found, _, _ = export(tmp_path / "model", tmp_path / "out")
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = np.stack((packed & 15, packed >> 4 & 15), 2).reshape(3, 64)
    expected = to_bfloat16(values[codes] * np.exp2(scale[0].astype(float) - 127).repeat(32, 1))
    assert found["model.layers.0.ffn.experts.0.w1.weight"] == ("BF16", (3, 64), expected)


def test_ascend_quantized_tensors_keep_their_scales(tmp_path: Path) -> None:
    module = {**TRAILING, "self_attn.q_a_proj.weight": tensor("I8", 4, H)}
    module["self_attn.q_a_proj.weight_scale"] = tensor("F32", 4, 1)
    source = write_checkpoint(tmp_path / "model", DEEPSEEK, trailing(module))
    described = {"model.layers.1.self_attn.q_a_proj.weight": "W8A8", "model.layers.0.x": "FLOAT", "version": "1"}
    (source / "quant_model_description.json").write_text(json.dumps(described))
    found, _, _ = export(source, tmp_path / "out")
    prefix = "model.layers.0.self_attn.q_a_proj.weight"
    assert found[prefix] == raw(module["self_attn.q_a_proj.weight"])
    assert found[f"{prefix}_scale"] == raw(module["self_attn.q_a_proj.weight_scale"])
    assert json.loads((tmp_path / "out" / "quant_model_description.json").read_text()) == {prefix: "W8A8"}


def test_head_in_a_file_outside_the_index_is_exported(tmp_path: Path) -> None:
    config, tensors, draft, _ = CASES["mimo"]
    source = write_checkpoint(tmp_path / "model", config, TRUNK)
    write_checkpoint(tmp_path / "head", config, {n: a for n, a in tensors.items() if n not in TRUNK}, shards=1)
    (tmp_path / "head" / "model-00001-of-00001.safetensors").rename(source / "mtp.safetensors")
    found, _, _ = export(source, tmp_path / "out")
    assert found.keys() == draft.keys()


def test_model_type_option_overrides_the_config(tmp_path: Path) -> None:
    _, tensors, draft, _ = CASES["deepseek_v3"]
    write_checkpoint(tmp_path / "model", {**DEEPSEEK, "model_type": "mine", "architectures": []}, tensors)
    with pytest.raises(ModelError, match="'mine'"):
        export(tmp_path / "model", tmp_path / "out")
    found, written, _ = export(tmp_path / "model", tmp_path / "out", model_type="DeepSeek_V3")
    assert found.keys() == draft.keys() and written["model_type"] == "deepseek_v3_mtp"


def spoil_index(source: Path) -> None:
    file = source / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["nowhere.weight"] = "model-00001-of-00003.safetensors"
    file.write_text(json.dumps(index))


def truncate(source: Path) -> None:
    file = source / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


FP8 = {"self_attn.q_a_proj.weight": tensor("F8_E4M3", 4, H)}
GRID = FP8 | {"self_attn.q_a_proj.weight_scale_inv": tensor("F32", 2, 2)}
LONE = TRAILING | {"self_attn.kv_b_proj.weight_scale_inv": tensor("F32", 1, 1)}
NO_EXPERT = {name: array for name, array in TRAILING.items() if "experts.1." not in name}
NO_PROJECTION = {name: array for name, array in TRAILING.items() if "eh_proj" not in name}
BROKEN_MODULES: dict[str, tuple[dict[str, Array], str]] = {
    "no module": ({}, "no tensors under model.layers.1."),
    "half a module": (NO_PROJECTION, "lacks eh_proj.weight"),
    "an expert": (NO_EXPERT, "1 of 2 experts"),
    "scales alone": (LONE, "scales a weight that is not there"),
    "codes alone": (TRAILING | FP8, "has no scales"),
    "GPTQ": (TRAILING | {"mlp.experts.0.up_proj.qweight": tensor("F32", 4, H)}, "has no scales"),
    "grid": (TRAILING | GRID, "do not fit the blocks"),
}
BROKEN_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "two modules": ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
    "no number of modules": ({"num_nextn_predict_layers": None}, "has none of num_nextn_predict_layers"),
    "zero": ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers is None"),
    "no type": ({"model_type": "", "architectures": None}, "neither model_type nor architectures"),
    "MiMo-V2": ({"model_type": "mimo_v2_flash", "architectures": ["MiMoV2FlashForCausalLM"]}, "mimo_v2"),
    "GLM-4.7-Flash": ({"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]}, "latent attention"),
    "GLM-5.3-Flash": ({"model_type": "glm5_next"}, "no draft of this type"),
    "no end of modules": ({"model_type": "qwen3_5", "architectures": [], "mtp_num_hidden_layers": 10**8}, "at most 64"),
    "no end of experts": ({"n_routed_experts": 10**9}, "of 1000000000 experts"),
    "endless": ({"num_nextn_predict_layers": float("inf")}, "is inf"),
    "a list of layers": (
        {"model_type": "deepseek_v32", "index_topk_freq": [1], "index_share_for_mtp_iteration": True,
         "index_n_heads": 1, "index_head_dim": 1, "index_topk": 1},
        "index_topk_freq is [1]"),
    "DSpark": ({"model_type": "deepseek_v4", "dspark_block_size": 7}, "DSpark"),
}  # fmt: skip
BROKEN_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard": (
        lambda source: (source / "model-00002-of-00003.safetensors").unlink(),
        "names the shard model-00002-of-00003.safetensors, which is missing",
    ),
    "index": (spoil_index, "says tensor nowhere.weight is in"),
    "truncated": (truncate, "model-00002-of-00003.safetensors"),
    "config": (lambda source: (source / "config.json").write_text("{"), "not valid JSON"),
    "no config": (lambda source: (source / "config.json").unlink(), "config.json"),
}
BROKEN = {**BROKEN_MODULES, **BROKEN_CONFIGS, **BROKEN_FILES}


@pytest.mark.parametrize("change", BROKEN)
def test_bad_input_is_refused_before_files_are_written(change: str, tmp_path: Path, capsys: Capture) -> None:
    module, _ = BROKEN_MODULES.get(change, (TRAILING, ""))
    config, _ = BROKEN_CONFIGS.get(change, ({}, ""))
    source = write_checkpoint(tmp_path / "model", {**DEEPSEEK, **config}, trailing(module))
    spoil, said = BROKEN_FILES.get(change, (lambda source: None, BROKEN[change][1]))
    spoil(source)
    assert main(["export", str(source), "-o", str(tmp_path / "deep" / "out")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out and not (tmp_path / "deep").exists()


@pytest.mark.slow
def test_memory_stays_below_two_of_the_largest_tensors(tmp_path: Path) -> None:
    """One plain tensor of 24 MB and one FP8 matrix that becomes 24 MB."""
    rows, columns = 6144, 2048
    module = {
        **TRAILING,
        "embed_tokens.weight": tensor("BF16", rows, columns),
        "mlp.experts.0.up_proj.weight": tensor("F8_E4M3", rows, columns),
        "mlp.experts.0.up_proj.weight_scale_inv": np.ones((rows // 128, columns // 128), np.float32),
    }
    source = write_checkpoint(tmp_path / "model", DEEPSEEK, trailing(module))
    del module
    tracemalloc.start()
    run(ExportOptions(model=str(source), out=tmp_path / "out"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < rows * columns * 2 * 2


def test_declared_module_must_exist(tmp_path: Path) -> None:
    shared = {**of("model.language_model.", embed_tokens=(V, H)), **of("", lm_head=(V, H))}
    config = {**QWEN, "text_config": {**QWEN_TEXT, "mtp_num_hidden_layers": 2}}
    write_checkpoint(tmp_path / "model", config, {**shared, **under("mtp.", {**FC, **DENSE})})
    with pytest.raises(ModelError, match=r"no decoder layer under layers\.1"):
        run(ExportOptions(model=str(tmp_path / "model"), out=tmp_path / "out"))
