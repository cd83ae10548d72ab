"""`headstart export` to EAGLE, speculators and GGUF: tensor names and config keys, and reasons of refusals."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import support
from checkpoints import raw, read_raw, tensor, write_checkpoint
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.engine.load import attach_head, load_model
from headstart.errors import ModelError
from headstart.formats.safetensors import Array, bfloat16
from headstart.formats.safetensors_file import read_file
from headstart.heads.base import HeadSpec
from headstart.heads.files import read_head, write_head
from headstart.heads.kind import HeadCheckpoint, head_kind, plain_parts
from headstart.layers.build import raw_lm_head
from headstart.models.classify import classify_path
from headstart.models.small import random_arrays
from headstart.tools.export.run import ExportOptions, run
from headstart.tools.export.source import ExportRequest
from headstart.tools.export.targets.vllm_eagle import plan

H, V, F = 8, 12, 16
DEEPSEEK = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": H,
    "num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "quantization_config": {"weight_block_size": [128, 128]},
}  # fmt: skip
TRAILING: dict[str, Array] = {
    "embed_tokens.weight": tensor("BF16", V, H),
    "shared_head.head.weight": tensor("BF16", V, H),
    "shared_head.norm.weight": tensor("BF16", H),
    "enorm.weight": tensor("BF16", H, seed=1),
    "hnorm.weight": tensor("BF16", H, seed=2),
    "eh_proj.weight": tensor("BF16", H, 2 * H),
    "input_layernorm.weight": tensor("BF16", H, seed=3),
    "self_attn.o_proj.weight": tensor("F8_E4M3", 4, H),
    "self_attn.o_proj.weight_scale_inv": tensor("F32", 1, 1),
}
QWEN_TEXT = {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 1, "mtp_num_hidden_layers": 1, "hidden_size": H}
QWEN: dict[str, Array] = {
    "mtp.fc.weight": tensor("BF16", H, 2 * H),
    "mtp.norm.weight": tensor("BF16", H),
    "mtp.pre_fc_norm_hidden.weight": tensor("BF16", H, seed=1),
    "mtp.pre_fc_norm_embedding.weight": tensor("BF16", H, seed=2),
    "mtp.layers.0.input_layernorm.weight": tensor("BF16", H, seed=3),
    **{
        f"mtp.layers.0.mlp.experts.{expert}.{part}_proj.weight": tensor("BF16", *shape, seed=10 * expert + len(part))
        for expert in range(3)
        for part, shape in (("gate", (F, H)), ("up", (F, H)), ("down", (H, F)))
    },
}


def test_deepseek_module_is_exported_as_an_eagle_drafter(tmp_path: Path) -> None:
    tensors = {f"model.layers.2.{name}": array for name, array in TRAILING.items()}
    source = write_checkpoint(tmp_path / "model", DEEPSEEK, {"model.norm.weight": tensor("BF16", H), **tensors})
    run(ExportOptions(model=str(source), to="vllm-eagle", out=tmp_path / "out"))
    names = {
        "enorm": "enorm", "hnorm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm",
        "layers.0.input_layernorm": "input_layernorm", "layers.0.self_attn.o_proj": "self_attn.o_proj",
    }  # fmt: skip
    expected = {f"{new}.weight": raw(TRAILING[f"{name}.weight"]) for new, name in names.items()}
    expected["layers.0.self_attn.o_proj.weight_scale_inv"] = raw(TRAILING["self_attn.o_proj.weight_scale_inv"])
    assert read_raw(tmp_path / "out" / "model.safetensors") == expected
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {**DEEPSEEK, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    kinds = [classify_path(tmp_path / "out"), plan(ExportRequest(str(source))).drafter]
    assert [(each.kind, each.method) for each in kinds] == [("eagle", "eagle")] * 2


def test_qwen_module_is_exported_to_speculators(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5Moe"], "text_config": QWEN_TEXT}
    trunk = {"model.language_model.embed_tokens.weight": tensor("BF16", V, H), "lm_head.weight": tensor("BF16", V, H)}
    source = write_checkpoint(tmp_path / "model", config, {**trunk, **QWEN})
    run(ExportOptions(model=str(source), to="speculators", out=tmp_path / "out"))
    found = read_raw(tmp_path / "out" / "model.safetensors")

    def of(expert: int, part: str) -> bytes:
        return raw(QWEN[f"mtp.layers.0.mlp.experts.{expert}.{part}_proj.weight"])[2]

    names = {
        "input_proj": "fc", "final_layernorm": "norm", "hidden_layernorm": "pre_fc_norm_hidden",
        "token_layernorm": "pre_fc_norm_embedding", "input_layernorm": "layers.0.input_layernorm",
    }  # fmt: skip
    experts = {
        "gate_up": ((3, 2 * F, H), b"".join(of(expert, part) for expert in range(3) for part in ("gate", "up"))),
        "down": ((3, H, F), b"".join(of(expert, "down") for expert in range(3))),
    }
    assert found == {
        **{f"mtp_layers.0.{new}.weight": raw(QWEN[f"mtp.{name}.weight"]) for new, name in names.items()},
        **{f"mtp_layers.0.mlp.experts.{part}_proj": ("BF16", *each) for part, each in experts.items()},
    }
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["speculators_model_type"] == "mtp"
    assert written["transformer_layer_config"] == {**QWEN_TEXT, "architectures": ["Qwen3_5Moe"]}
    assert written["speculators_config"]["verifier"]["architectures"] == ["Qwen3_5Moe"]


@pytest.fixture
def trunk_gguf(tmp_path: Path) -> Path:
    """A GGUF trunk of the tiny Llama's sizes, with only the metadata and tensors that an exporter reads."""
    writer = GGUFWriter(tmp_path / "trunk.gguf", arch="llama")
    sizes = support.family_of("llama").parse(support.family_of("llama").tiny()[0])
    writer.add_block_count(sizes.num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(sizes.hidden_size)
    attention, mlp = plain_parts(sizes.head_layer)
    writer.add_feed_forward_length(mlp.inner)
    writer.add_head_count(attention.spec.num_heads)
    writer.add_head_count_kv(attention.spec.num_kv_heads)
    writer.add_rope_dimension_count(attention.spec.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(sizes.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{number}" for number in range(sizes.vocab_size)])
    writer.add_token_merges([])
    writer.add_tensor("token_embd.weight", np.zeros((sizes.vocab_size, sizes.hidden_size), np.float32))
    return gguf_files.written(writer, tmp_path / "trunk.gguf")


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    """A random EAGLE-3 head for the tiny Llama, with a draft vocabulary."""
    model = support.tiny_model("llama")
    spec, ids = support.eagle3_spec(model), np.arange(1, model.config.vocab_size, 2)
    arrays = {name: bfloat16(each) for name, each in support.eagle3_arrays(model, spec, ids.tolist()).items()}
    support.write_head(tmp_path / "eagle3", model.config, spec, arrays, ids)
    return tmp_path / "eagle3"


def test_eagle3_head_is_exported_to_speculators(trunk_gguf: Path, eagle3: Path, tmp_path: Path) -> None:
    report = run(ExportOptions(model=str(trunk_gguf), head=eagle3, to="speculators", out=tmp_path / "out"))
    assert "give vLLM that model as safetensors" in report.data["notes"][0]  # vLLM cannot load a GGUF verifier
    assert report.data["use"].startswith("vllm serve MODEL --speculative-config")
    found, expected = read_raw(tmp_path / "out" / "model.safetensors"), read_raw(eagle3 / "model.safetensors")
    assert found == {name.replace("midlayer.", "layers.0."): each for name, each in expected.items()}
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["speculators_model_type"], written["draft_vocab_size"]) == ("eagle3", 65)
    assert written["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    layer = written["transformer_layer_config"]
    assert (layer["hidden_size"], layer["model_type"]) == (48, "llama")


@pytest.mark.parametrize("to", ["vllm-eagle3", "speculators"])
def test_eagle3_head_is_exported_with_the_context_length_of_its_trunk(
    to: str, trunk_gguf: Path, eagle3: Path, tmp_path: Path
) -> None:
    """vLLM drafts within max_position_embeddings of the drafter alone."""
    head = read_head(eagle3)
    write_head(tmp_path / "own", head, {name: each.float32() for name, each in head.tensors.items()})
    run(ExportOptions(model=str(trunk_gguf), head=tmp_path / "own", to=to, out=tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.get("transformer_layer_config", written)["max_position_embeddings"] == 512


def test_eagle_3_1_norms_are_exported(trunk_gguf: Path, eagle3: Path, tmp_path: Path) -> None:
    """Also from a nested config without taps and draft vocabulary size."""
    torch, files = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    path = eagle3 / "model.safetensors"
    files.save_file({**files.load_file(path), "input_norm.weight": torch.ones(3 * 48)}, path)
    document = json.loads((eagle3 / "config.json").read_text())
    for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids"):
        del document[key]
    nested = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "norm_before_fc": True,
              "norm_output": True, "transformer_layer_config": document}  # fmt: skip
    (eagle3 / "config.json").write_text(json.dumps(nested))
    run(ExportOptions(model=str(trunk_gguf), head=eagle3, to="speculators", out=tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["norm_before_fc"], written["norm_output"], written["draft_vocab_size"]) == (True, True, 65)
    assert "transformer_layer_config" not in written["transformer_layer_config"]
    (eagle3 / "config.json").write_text(json.dumps(nested | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}))
    with pytest.raises(ModelError, match="norm_output"):
        run(ExportOptions(model=str(trunk_gguf), head=eagle3, to="gguf", out=tmp_path / "gguf"))
    listed = {**nested, "norm_output": False, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (eagle3 / "config.json").write_text(json.dumps(listed))
    run(ExportOptions(model=str(trunk_gguf), head=eagle3, to="gguf", out=tmp_path / "gguf"))
    reader = GGUFReader(tmp_path / "gguf" / "eagle3-trunk.gguf")
    assert reader.fields["eagle3.norm_before_fc"].contents() is True
    assert "enc.output_norm.weight" in {each.name for each in reader.tensors}


def test_verifier_path_is_absolute(eagle3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = support.write_model(tmp_path / "model", *support.family_of("llama").tiny())
    monkeypatch.chdir(tmp_path)
    report = run(ExportOptions(model="model", head=eagle3, to="speculators", out=tmp_path / "an out"))
    verifier = json.loads((tmp_path / "an out" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(model.resolve())
    assert report.data["use"] == f"vllm serve '{tmp_path / 'an out'}'"


def test_printed_command_quotes_the_trunk_file_name(trunk_gguf: Path, eagle3: Path, tmp_path: Path) -> None:
    trunk = trunk_gguf.rename(tmp_path / "my {7} b.gguf")
    report = run(ExportOptions(model=str(trunk), head=eagle3, to="gguf", out=tmp_path / "out"))
    words = shlex.split(report.data["use"])
    assert words[words.index("-md") + 1] == str(tmp_path / "out" / "eagle3-my {7} b.gguf")


def test_eagle3_head_with_scaled_rope_is_refused_for_gguf(trunk_gguf: Path, eagle3: Path, tmp_path: Path) -> None:
    document = json.loads((eagle3 / "config.json").read_text())
    (eagle3 / "config.json").write_text(json.dumps({**document, "rope_scaling": {"type": "linear", "factor": 2.0}}))
    with pytest.raises(ModelError, match="RoPE is scaled"):
        run(ExportOptions(model=str(trunk_gguf), head=eagle3, to="gguf", out=tmp_path / "out"))


def test_eagle3_head_is_exported_to_gguf(trunk_gguf: Path, eagle3: Path, tmp_path: Path) -> None:
    run(ExportOptions(model=str(trunk_gguf), head=eagle3, to="gguf", out=tmp_path / "out"))
    reader = GGUFReader(tmp_path / "out" / "eagle3-trunk.gguf")
    values = {key: field.contents() for key, field in reader.fields.items()}
    assert values | {
        "general.architecture": "eagle3", "eagle3.target_layers": [0, 1, 2], "eagle3.target_hidden_size": 48,
        "eagle3.embedding_length": 48, "eagle3.norm_before_residual": False, "eagle3.rope.freq_base": 10000.0,
    } == values  # fmt: skip
    assert values["tokenizer.ggml.tokens"][5] == "t5"
    tensors = {each.name: each for each in reader.tensors}
    assert tensors["d2t"].data.tolist() == list(range(1, 131, 2))  # ids, not offsets
    theirs = read_file(eagle3 / "model.safetensors")
    for name, other in {"fc": "fc", "blk.0.attn_v": "midlayer.self_attn.v_proj"}.items():
        assert tensors[f"{name}.weight"].data.tobytes() == theirs[f"{other}.weight"].data.tobytes()
    query = theirs["midlayer.self_attn.q_proj.weight"].data.view(np.uint16)
    paired = [row for head in range(6) for i in range(4) for row in (8 * head + i, 8 * head + i + 4)]
    assert tensors["blk.0.attn_q.weight"].data.tobytes() == query[paired].tobytes()
    assert tensors["blk.0.attn_norm_2.weight"].tensor_type == GGMLQuantizationType.F32


def test_eagle3_head_gets_the_tokenizer_of_a_split_gguf_model(trunk_gguf: Path, eagle3: Path, tmp_path: Path) -> None:
    """Only the first part has metadata."""
    first, second = (tmp_path / f"trunk-0000{number}-of-00002.gguf" for number in (1, 2))
    trunk_gguf.rename(first)
    writer = GGUFWriter(second, arch="llama")
    writer.add_tensor("output_norm.weight", np.zeros(48, np.float32))
    gguf_files.written(writer, second)
    run(ExportOptions(model=str(second), head=eagle3, to="gguf", out=tmp_path / "out"))
    fields = GGUFReader(tmp_path / "out" / "eagle3-trunk.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[5] == "t5"


def write_gguf(
    path: Path, architecture: str = "qwen35", heads: int = 1, last: str = "nextn.eh_proj", per_part: int = 0
) -> Path:
    """A GGUF file with two trunk blocks and one MTP block, two tensor types, and metadata of every type. `per_part`:
    tensors of each part of a split model; 0: one file."""
    writer = GGUFWriter(path, arch=architecture, split_max_tensors=per_part)
    writer.add_block_count(3)
    if heads:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", heads)
    writer.add_array(f"{architecture}.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_float32(f"{architecture}.rope.freq_base", 1e7)
    writer.add_token_list(["a", "ü", "c"])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    for i, name in enumerate(("token_embd", "blk.0.attn_norm", "blk.1.ffn_up", f"blk.2.{last}", "output_norm")):
        writer.add_tensor(f"{name}.weight", np.full((2, 32), i, np.float32))
    quantized = np.arange(2 * 34, dtype=np.uint8).reshape(2, 34)
    writer.add_tensor("blk.2.ffn_up.weight", quantized, raw_dtype=GGMLQuantizationType.Q8_0)
    return gguf_files.written(writer, path)


def test_mtp_head_is_extracted_from_a_gguf_file(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model.gguf")
    run(ExportOptions(model=str(source), to="gguf", out=tmp_path / "out"))
    before, after = GGUFReader(source), GGUFReader(tmp_path / "out" / "mtp-model.gguf")
    kept = {"token_embd.weight", "output_norm.weight", "blk.2.nextn.eh_proj.weight", "blk.2.ffn_up.weight"}
    expected = {each.name: (each.tensor_type, each.data.tobytes()) for each in before.tensors if each.name in kept}
    assert {each.name: (each.tensor_type, each.data.tobytes()) for each in after.tensors} == expected
    told = [{k: f.contents() for k, f in r.fields.items() if not k.startswith("GGUF.")} for r in (before, after)]
    assert told[0] == told[1]


@pytest.mark.parametrize("part", [1, 3])
def test_mtp_head_is_extracted_from_all_parts_of_a_split_gguf_model(part: int, tmp_path: Path) -> None:
    """The metadata comes from the first part. The written file is whole, so it says nothing about parts."""
    write_gguf(tmp_path / "model.gguf", per_part=2)
    sources = write_gguf(tmp_path / "whole.gguf"), tmp_path / f"model-0000{part}-of-00003.gguf"
    for source in sources:
        run(ExportOptions(model=str(source), to="gguf", out=tmp_path / source.stem))
    written = [tmp_path / source.stem / f"mtp-{source.stem[:5]}.gguf" for source in sources]
    assert written[0].read_bytes() == written[1].read_bytes()


BLOCK = {
    "input_layernorm": ("attn_norm", (H,)), "post_attention_layernorm": ("post_attention_norm", (H,)),
    "self_attn.q_proj": ("attn_q", (2 * H, H)), "self_attn.k_proj": ("attn_k", (4, H)),
    "self_attn.v_proj": ("attn_v", (4, H)), "self_attn.o_proj": ("attn_output", (H, H)),
    "self_attn.q_norm": ("attn_q_norm", (4,)), "self_attn.k_norm": ("attn_k_norm", (4,)),
    "mlp.gate": ("ffn_gate_inp", (3, H)), "mlp.shared_expert_gate": ("ffn_gate_inp_shexp", (1, H)),
    "mlp.shared_expert.gate_proj": ("ffn_gate_shexp", (F, H)), "mlp.shared_expert.up_proj": ("ffn_up_shexp", (F, H)),
    "mlp.shared_expert.down_proj": ("ffn_down_shexp", (H, F)),
}  # fmt: skip
LINK = {
    "mtp.fc": ("blk.1.nextn.eh_proj", (H, 2 * H)), "mtp.norm": ("blk.1.nextn.shared_head_norm", (H,)),
    "mtp.pre_fc_norm_hidden": ("blk.1.nextn.hnorm", (H,)), "mtp.pre_fc_norm_embedding": ("blk.1.nextn.enorm", (H,)),
    "model.language_model.embed_tokens": ("token_embd", (V, H)), "lm_head": ("output", (V, H)),
    "model.language_model.norm": ("output_norm", (H,)),
}  # fmt: skip
QWEN_SIZES = {
    **QWEN_TEXT, "vocab_size": V, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "num_experts": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": F, "shared_expert_intermediate_size": F, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "layer_types": ["linear_attention"], "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 2, "linear_value_head_dim": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
}  # fmt: skip


def float32(array: Array, shift: float) -> bytes:
    return ((array[0].astype(np.uint32) << 16).view(np.float32) + np.float32(shift)).tobytes()


def test_layer_types_follow_full_attention_interval() -> None:
    from headstart.tools.export.gguf_model import _layer_types

    kinds = ["linear_attention", "linear_attention", "full_attention"]
    assert _layer_types({"full_attention_interval": 3}, 6) == kinds * 2
    assert _layer_types({"layer_types": kinds, "full_attention_interval": 2}, 3) == kinds
    with pytest.raises(ModelError, match="must name 4 layers"):
        _layer_types({"layer_types": kinds}, 4)


@pytest.mark.parametrize("fused", [False, True])
def test_qwen_module_is_exported_to_gguf(fused: bool, tmp_path: Path) -> None:
    names = LINK | {f"mtp.layers.0.{name}": (f"blk.1.{new}", shape) for name, (new, shape) in BLOCK.items()}
    tensors = {f"{name}.weight": tensor("BF16", *shape, seed=i) for i, (name, (_, shape)) in enumerate(names.items())}
    parts = {part: tensor("BF16", 3, *shape) for part, shape in (("gate", (F, H)), ("up", (F, H)), ("down", (H, F)))}
    bits = {part: array[0] for part, array in parts.items()}
    prefix = "mtp.layers.0.mlp.experts"
    if fused:
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate((bits["gate"], bits["up"]), 1), "BF16"
        tensors[f"{prefix}.down_proj"] = parts["down"]
    else:
        tensors |= {f"{prefix}.{e}.{part}_proj.weight": (bits[part][e], "BF16") for e in range(3) for part in bits}
    config = {"model_type": "qwen3_5_moe", "architectures": [], "text_config": QWEN_SIZES}
    source = write_checkpoint(tmp_path / "model", config, tensors)
    vocabulary = {"a": 0, "b": 1, "ab": 2}
    added = [{"id": 4, "content": "<|end|>", "special": True}, {"id": 5, "content": "tool", "special": False}]
    tokenizer = {"model": {"vocab": vocabulary, "merges": ["a b"]}, "added_tokens": added}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    run(ExportOptions(model=str(source), to="gguf", out=tmp_path / "out"))
    reader = GGUFReader(tmp_path / "out" / "mtp-model.gguf")
    found = {each.name: (each.tensor_type.name, each.data.tobytes()) for each in reader.tensors}
    expected = {f"blk.1.ffn_{part}_exps.weight": ("BF16", bits[part].tobytes()) for part in bits}
    for name, (new, shape) in names.items():
        array = tensors[f"{name}.weight"]
        in_float = len(shape) == 1 or "gate_inp" in new
        shift = 1.0 if len(shape) == 1 else 0.0  # norms multiply by 1 + w
        expected[f"{new}.weight"] = ("F32", float32(array, shift)) if in_float else ("BF16", raw(array)[2])
    assert found == expected
    values = {key.removeprefix("qwen35moe."): field.contents() for key, field in reader.fields.items()}
    assert values | {
        "general.architecture": "qwen35moe", "block_count": 2, "nextn_predict_layers": 1, "expert_count": 3,
        "attention.key_length": 4, "rope.dimension_count": 2, "rope.dimension_sections": [1, 1, 0, 0],
        "rope.freq_base": 1e7, "attention.recurrent_layers": [True, False], "ssm.inner_size": 12,
        "ssm.time_step_rank": 4, "tokenizer.ggml.pre": "qwen35", "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.token_type": [1, 1, 1, 5, 3, 4, 5, 5, 5, 5, 5, 5],
        "tokenizer.ggml.tokens": ["a", "b", "ab", "[PAD3]", "<|end|>", "tool", *(f"[PAD{i}]" for i in range(6, 12))],
    } == values  # fmt: skip


def mtp_head(folder: Path) -> Path:
    sizes = support.family_of("llama").parse(support.family_of("llama").tiny()[0])
    spec = HeadSpec(layer=sizes.head_layer)
    shapes = head_kind("mtp").shapes(spec, sizes.hidden_size)
    return support.write_head(folder, sizes, spec, {n: bfloat16(a) for n, a in random_arrays(shapes).items()})


REFUSED: dict[str, tuple[str, str]] = {
    "glm4_moe vllm-eagle": ("vllm-eagle", "no EAGLE drafter with the formula of glm4_moe"),
    "deepseek_v3 speculators": ("speculators", "no MTP layer for 'deepseek_v3'"),
    "deepseek_v3 gguf": ("gguf", "its converter drops the module"),
    "deepseek_v32 gguf": ("gguf", "convert_hf_to_gguf.py --mtp"),
    "head vllm-eagle": ("vllm-eagle", "no norms around its projection"),
    "head speculators": ("speculators", "has no class for this one"),
    "head gguf": ("gguf", "no architecture for it"),
    "head xllm": ("xllm", "--to vllm-mimo makes one checkpoint"),
    "llama.gguf gguf": ("gguf", "no MTP graph for exaone-moe"),
    "bare.gguf gguf": ("gguf", "nextn_predict_layers is not set"),
    "hollow.gguf gguf": ("gguf", "no tensors of an MTP head in blocks 2 and up"),
    "bare.gguf xllm": ("xllm", "is a single file"),
    "mimo vllm-eagle3": ("vllm-eagle3", "has no separate head"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_exports_give_the_reason(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to, said = REFUSED[case]
    kind = case.split()[0]
    more: list[str] = []
    if kind.endswith(".gguf"):
        options: dict[str, dict[str, Any]] = {
            "llama": {"architecture": "exaone-moe"}, "bare": {"heads": 0}, "hollow": {"last": "attn_norm"}
        }  # fmt: skip
        source = write_gguf(tmp_path / kind, **options[kind.removesuffix(".gguf")])
    elif kind == "head":
        source = support.write_model(tmp_path / "model", *support.family_of("llama").tiny())
        more = ["--head", str(mtp_head(tmp_path / "head"))]
    else:
        source = write_checkpoint(
            tmp_path / "model",
            {**DEEPSEEK, "model_type": kind, "architectures": [], "n_routed_experts": 1, "index_topk": 1},
            {f"model.layers.2.{name}": array for name, array in TRAILING.items()},
        )  # fmt: skip
    assert main(["export", str(source), "--to", to, "-o", str(tmp_path / "out"), *more]) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "out").exists()


def test_activation_without_a_gguf_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = support.write_model(tmp_path / "model", *support.family_of("glm4_moe").tiny(hidden_act="gelu"))
    assert main(["export", str(source), "--to", "gguf", "-o", str(tmp_path / "out")]) == 2
    assert "hidden_act is 'gelu', which GGUF files cannot express" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("layout", ["vllm-eagle3", "speculators"])
def test_trained_eagle3_head_gets_the_lm_head_of_the_trunk(layout: str, tmp_path: Path) -> None:
    """`train` leaves the LM head out of the file; other engines need its draft-token rows there."""
    folder = support.write_model(tmp_path / "model", *support.family_of("llama").tiny())
    model = load_model(str(folder), EngineConfig(backend="reference", threads=1))
    spec, ids = support.eagle3_spec(model), np.arange(1, model.config.vocab_size, 2)
    arrays = support.eagle3_arrays(model, spec)
    head = HeadCheckpoint(
        spec=spec, hidden_size=model.config.hidden_size, vocab_size=model.config.vocab_size, draft_token_ids=ids
    )  # fmt: skip
    write_head(tmp_path / "head", head, {name: each for name, each in arrays.items() if name != "lm_head.weight"})
    out = tmp_path / "out"
    run(ExportOptions(model=str(folder), head=tmp_path / "head", to=layout, out=out))
    found = read_head(out)
    assert (found.spec.layer, found.spec.tap) == (spec.layer, spec.tap)
    assert found.draft_token_ids is not None and np.array_equal(found.draft_token_ids, ids)
    rows = raw_lm_head(model.weights, model.config).take_rows(ids).float32()
    np.testing.assert_allclose(found.tensors["lm_head.weight"].float32(), rows, rtol=2**-8)
    assert attach_head(model, out).lm_head is not None


def test_specforge_layer_ids_are_converted_for_vllm(tmp_path: Path) -> None:
    """SpecForge's ids in `eagle_config` count layer outputs from 1; vLLM reads the input of the layer."""
    folder = support.write_model(tmp_path / "model", *support.family_of("llama").tiny(num_hidden_layers=4))
    model = load_model(str(folder), EngineConfig(backend="reference", threads=1))
    spec = replace(support.eagle3_spec(model), tap=(2, 3))
    head = HeadCheckpoint(spec=spec, hidden_size=model.config.hidden_size, vocab_size=model.config.vocab_size)
    published = tmp_path / "published"
    write_head(tmp_path / "head", head, support.eagle3_arrays(model, spec))
    run(ExportOptions(model=str(folder), head=tmp_path / "head", to="vllm-eagle3", out=published))
    config = json.loads((published / "config.json").read_text())
    assert config.pop("eagle_aux_hidden_state_layer_ids") == [2, 3]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    (published / "config.json").write_text(json.dumps(config))
    run(ExportOptions(model=str(folder), head=published, to="vllm-eagle3", out=tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found == config | {"eagle_aux_hidden_state_layer_ids": [2, 3]}  # vLLM reads the top level first
