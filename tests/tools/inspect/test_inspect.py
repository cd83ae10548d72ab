"""`headstart inspect`: declared MTP modules, packed weights, findings, targets, GGUF files, the command, --deep."""

import json
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
from tiny_models import write_tiny
from zoo import SIZES, ZOO, H, N, Tensors, V, config_of, heads, trunk, write, write_file

from headstart.cli.main import main
from headstart.errors import ModelError, UsageError
from headstart.formats import safetensors
from headstart.formats.base import BITS, File, Tensor
from headstart.formats.quantization import weight_headers
from headstart.formats.sizes import Sizes, Unknown, text_config
from headstart.formats.tensor_parts import part_of
from headstart.heads.base import HeadSpec
from headstart.heads.files import write_head
from headstart.heads.kind import HeadCheckpoint
from headstart.hub import cached_trunk
from headstart.models.families import find_mtp_family
from headstart.models.mtp import declared
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions

QWEN = ZOO["qwen3_5"]


def inspect_data(folder: Path, config: dict[str, Any], tensors: Tensors, **more: Any) -> dict[str, Any]:
    return inspect.run(InspectOptions(model=str(write(folder, config, tensors)), **more)).data


def findings_about(data: dict[str, Any], topic: str) -> list[str]:
    return [f"{each['level']}: {each['text']}" for each in data["findings"] if each["topic"] == topic]


# Declared modules


@pytest.mark.parametrize(("config", "expected"), [
    ({}, (0, None)),
    ({"num_nextn_predict_layers": 1}, (1, "num_nextn_predict_layers")),
    ({"mtp_num_hidden_layers": 1}, (1, "mtp_num_hidden_layers")),
    ({"num_mtp_layers": 2}, (2, "num_mtp_layers")),
    ({"num_mtp_modules": 3}, (3, "num_mtp_modules")),
    ({"text_config": {"mtp_num_hidden_layers": 1}}, (1, "text_config.mtp_num_hidden_layers")),
    ({"num_nextn_predict_layers": 0, "llm_config": {"num_mtp_layers": 1}}, (1, "llm_config.num_mtp_layers")),
    ({"mtp_config": {"num_nextn_predict_layers": 8}}, (8, "mtp_config.num_nextn_predict_layers")),
    ({"num_nextn_predict_layers": 0}, (0, "num_nextn_predict_layers")),
    ({"num_nextn_predict_layers": None, "num_mtp_layers": "2"}, (0, "num_mtp_layers")),
    ({"num_nextn_predict_layers": True}, (0, "num_nextn_predict_layers")),
])  # fmt: skip
def test_declared_modules_are_read_from_every_count_key(
    config: dict[str, Any], expected: tuple[int, str | None]
) -> None:
    assert declared(config) == expected


def test_count_key_of_hy_v4_includes_one_more(tmp_path: Path) -> None:
    entry = ZOO["hy_v4"]
    tensors = trunk(entry) | heads(entry)
    for count, verdict in ((1, "alive"), (2, "alive"), (3, "partial")):
        assert inspect_data(tmp_path, config_of(entry, count), tensors)["heads"]["verdict"] == verdict


@pytest.mark.slow
def test_absurd_module_counts_and_sizes_are_handled(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="1000000000"):
        declared({"num_nextn_predict_layers": 10**9})
    entry = ZOO["deepseek_v3"]
    config = config_of(entry) | {"n_routed_experts": 2**39, "num_attention_heads": 2**39}
    assert inspect_data(tmp_path, config, trunk(entry) | heads(entry))["heads"]["verdict"] == "partial"


@pytest.mark.parametrize("value", ["many", 2.5, [1, "x"]])
def test_sizes_that_are_no_integers_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelError, match=r"num_hidden_layers is .* which is no size"):
        inspect_data(tmp_path, {**SIZES, "model_type": "mimo", "num_hidden_layers": value}, trunk(QWEN))


def test_families_are_found_by_model_type_and_gguf_architecture() -> None:
    assert find_mtp_family({"model_type": "kimi_k2"}).key == "deepseek_v3"
    assert find_mtp_family({"model_type": "some_vl", "text_config": {"model_type": "qwen3_5_text"}}).key == "qwen3_5"
    assert find_mtp_family({"model_type": "qwen35"}, from_gguf=True).key == "qwen3_5"
    assert not find_mtp_family({"model_type": "llama"}) and not find_mtp_family({})
    assert text_config({"num_hidden_layers": 9, "text_config": {"num_hidden_layers": N}})["num_hidden_layers"] == N


def test_sizes_are_read_under_all_their_keys() -> None:
    config = {"n_embd": 8, "text_config": {"num_attention_heads": 2}, "eagle_config": {}, "target_layer_ids": [1, 2]}
    sizes = Sizes(config)
    assert (sizes["hidden"], sizes["kv_heads"], sizes["head_dim"], sizes["taps"]) == (8, 2, 4, 2)
    assert sizes.get("latent") is None and sizes.get("target_hidden") == 8
    unknown = 2 * (sizes["latent"] + 3)
    assert isinstance(unknown, Unknown) and unknown == 2 * (sizes["latent"] + 3) != 2 * sizes["latent"]
    assert isinstance(Sizes({"hidden_size": 8, "num_attention_heads": 0})["head_dim"], Unknown)


PARTS = {
    "embedding": ["model.embed_tokens"], "lm_head": ["lm_head"], "norms and rest": ["model.norm"],
    "layers": ["model.language_model.layers.3.mlp.up_proj", "layers.0.self_attn.q_proj"],
    "experts": ["model.layers.3.mlp.experts.7.up_proj"],
    "mtp": ["model.layers.4.eh_proj", "model.layers.4.mlp.experts.7.up_proj", "model.mtp_layers.0.input_proj",
            "model.mtp_emb_norm.0", "mtp.layers.0.mlp.gate_proj"],
    "other modalities": ["model.visual.blocks.0.attn.qkv", "model.vision_tower.encoder.layers.9.mlp.fc1"],
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_tensors_are_assigned_to_parts(part: str) -> None:
    assert {part_of(f"{name}.weight", 4) for name in PARTS[part]} == {part}


# Packed weights

X = "model.layers.0.mlp.up_proj"
COMPRESSED = {"quant_method": "compressed-tensors"}
PACKED: list[tuple[str, dict[str, Any], dict[str, tuple[str, tuple[int, ...]]]]] = [
    # (kind, quantization_config, tensors) of a [256, 512] matrix
    ("BF16", {}, {"weight": ("BF16", (256, 512))}),
    ("FP8 (128x128 blocks)", {"quant_method": "fp8"},
     {"weight": ("F8_E4M3", (256, 512)), "weight_scale_inv": ("F32", (2, 4))}),
    ("FP8", COMPRESSED,
     {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("BF16", (256, 1)), "input_scale": ("F32", ())}),
    ("int4 (gptq)", {"quant_method": "gptq", "bits": 4},
     {"qweight": ("I32", (64, 256)), "scales": ("F16", (4, 256)), "g_idx": ("I32", (512,))}),
    ("int8 (gptq)", {"quant_method": "gptq", "bits": 8},
     {"qweight": ("I32", (128, 256)), "qzeros": ("I32", (4, 64)), "scales": ("F16", (4, 256))}),
    ("int4 (awq)", {"quant_method": "awq", "bits": 4},
     {"qweight": ("I32", (512, 32)), "qzeros": ("I32", (4, 32)), "scales": ("F16", (4, 256))}),
    ("int8 (compressed-tensors)", COMPRESSED | {"config_groups": {"g": {"weights": {"num_bits": 8}}}},
     {"weight_packed": ("I32", (256, 128)), "weight_scale": ("BF16", (256, 4)), "weight_shape": ("I64", (2,))}),
    ("NVFP4", COMPRESSED,
     {"weight_packed": ("U8", (256, 256)), "weight_scale": ("F8_E4M3", (256, 32)), "input_scale": ("F32", ())}),
    ("NVFP4", {"quant_method": "modelopt"},
     {"weight": ("U8", (256, 256)), "weight_scale": ("F8_E4M3", (256, 32)), "weight_scale_2": ("F32", ())}),
    ("MXFP4", {}, {"weight": ("I8", (256, 256)), "scale": ("F8_E8M0", (256, 16))}),
    ("int8", COMPRESSED, {"weight": ("I8", (256, 512)), "weight_scale": ("BF16", (256, 1))}),
    ("int8 (bitsandbytes)", {}, {"weight": ("I8", (256, 512)), "SCB": ("F32", (256,))}),
    ("4-bit (bitsandbytes)", {},
     {"weight": ("U8", (65536, 1)), "weight.absmax": ("F32", (2048,)), "weight.quant_map": ("F32", (16,))}),
    ("int4 (mlx)", {"bits": 4},
     {"weight": ("U32", (256, 64)), "scales": ("BF16", (256, 8)), "biases": ("BF16", (256, 8))}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "stored"), PACKED)
def test_packed_weights_have_the_shape_and_kind_of_the_matrix(
    kind: str, settings: dict[str, Any], stored: dict[str, Any]
) -> None:
    tensors = {}
    for word, (dtype, size) in stored.items():
        nbytes = int(np.prod(size)) * BITS[dtype] // 8
        tensors[f"{X}.{word}"] = Tensor(f"{X}.{word}", size, dtype, File(Path("f")), 0, nbytes)
    found = weight_headers(tensors, {"quantization_config": settings})
    assert list(found) == [f"{X}.weight"]
    weight = found[f"{X}.weight"]
    assert weight.shape == (None if kind == "4-bit (bitsandbytes)" else (256, 512))
    assert (weight.kind, weight.parameters, weight.quantized) == (kind, 256 * 512, kind != "BF16")
    assert weight.nbytes == sum(entry.nbytes for entry in tensors.values())


def test_quantized_head_is_checked_by_its_unpacked_shapes(tmp_path: Path) -> None:
    tensors, name = trunk(QWEN) | heads(QWEN), "mtp.layers.0.mlp.up_proj"
    rows, columns = tensors.pop(f"{name}.weight")[1]
    tensors[f"{name}.weight_packed"] = ("I32", (rows, columns // 8))
    tensors[f"{name}.weight_scale"] = ("BF16", (rows, 1))
    data = inspect_data(tmp_path, config_of(QWEN) | {"quantization_config": COMPRESSED}, tensors)
    assert data["heads"]["verdict"] == "alive" and "int4 (compressed-tensors)" in data["parts"]["mtp"]["types"]
    assert "warning: the head is quantized (int4 (compressed-tensors))" in findings_about(data, "quantization")[0]


# Findings


@pytest.mark.parametrize(("settings", "warned"), [
    (COMPRESSED | {"ignore": ["lm_head"]}, True),
    (COMPRESSED | {"ignore": ["re:^mtp.*"]}, False),
    ({"quant_method": "fp8", "modules_to_not_convert": ["mtp"]}, False),
    ({"quant_method": "modelopt", "exclude_modules": ["mtp*"]}, False),
    ({"quant_method": "gptq", "dynamic": {"-:.*mtp.*": {}}}, False),
    ({"quant_method": "gptq", "dynamic": {"+:.*mtp.*": {}}}, True),
    (COMPRESSED | {"ignore": ["re:("]}, True),
    (COMPRESSED | {"ignore": ["re:([a-z.0-9_]+)+!"]}, False),  # catastrophic backtracking in a plain regex engine
])  # fmt: skip
def test_head_missing_from_the_quantization_ignore_list_is_warned_about(
    tmp_path: Path, settings: dict[str, Any], warned: bool
) -> None:
    tensors = trunk(QWEN) | heads(QWEN) | {f"{X}.weight": ("F8_E4M3", (40, H)), f"{X}.weight_scale": ("F32", (40, 1))}
    data = inspect_data(tmp_path, config_of(QWEN) | {"quantization_config": settings}, tensors)
    assert bool([text for text in findings_about(data, "quantization") if "leave it out" in text]) is warned


def test_embedding_and_lm_head_of_a_head_are_classified(tmp_path: Path) -> None:
    entry, copy = ZOO["deepseek_v3"], "model.layers.4.embed_tokens.weight"
    tensors = trunk(entry) | heads(entry) | {copy: ("BF16", (V, H))}
    folder = tmp_path / "m"
    data = inspect_data(folder, config_of(entry), tensors)
    assert (data["heads"]["embedding"], data["heads"]["lm_head"]) == ("copy", "shared")
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:  # the copy is the last tensor of the file
        handle.seek(file.stat().st_size - V * H * 2)
        handle.write(b"\1\2\3")
    data = inspect.run(InspectOptions(model=str(folder))).data
    assert data["heads"]["embedding"] == "changed" and "differs from the trunk's" in findings_about(data, "sharing")[0]
    entry = ZOO["step3p5"]
    assert inspect_data(tmp_path / "own", config_of(entry), trunk(entry) | heads(entry))["heads"]["lm_head"] == "own"


@pytest.mark.parametrize(("key", "changes", "topic", "text"), [
    ("step3p5", {"layer_types": ["full_attention"] * 4}, "config", "stops before the head"),
    ("step3p5", {"rope_theta": [1e4] * 5}, "rope", "rope_theta has 5 entries"),
    ("mimo_v2", {"rope_scaling": {"type": "yarn", "factor": 4}}, "rope", "does not reach the head"),
    ("nemotron_h", {}, "rope", "no positions"),
    ("qwen3_5", {"rope_theta": 1e6, "text_config.rope_theta": 1e7}, "rope", "text_config.rope_theta"),
    ("qwen3_5", {"rope_scaling": {"type": "yarn"}}, "rope", "engines read it from text_config"),
    ("qwen3_5", {"mtp_num_hidden_layers": 0}, "config", "engines disagree"),
    ("qwen3_5", {"tie_word_embeddings": True}, "tied", "an lm_head is stored"),
    ("qwen3_5", {}, "norm", "1 + w"),
    ("mimo", {}, "formula", "hidden state comes first"),
    ("deepseek_v4", {}, "formula", "added, not concatenated"),
    ("dots3_note", {"mtp_layer_types": ["a", "b"]}, "config", "mtp_layer_types has 2 entries for 1"),
    ("deepseek_v3", {"num_nextn_predict_layers": 0, "num_mtp_layers": 1}, "config", "engines read num_nextn"),
])  # fmt: skip
def test_findings_about_configs(tmp_path: Path, key: str, changes: dict[str, Any], topic: str, text: str) -> None:
    entry, config = ZOO[key], config_of(ZOO[key])
    for name, value in changes.items():
        place = config[name.partition(".")[0]] if "." in name else config
        place[name.rpartition(".")[2]] = value
    data = inspect_data(tmp_path, config, trunk(entry) | heads(entry))
    assert any(text in each for each in findings_about(data, topic)), data["findings"]


def test_tensors_outside_the_index_and_unknown_tensors_are_reported(tmp_path: Path) -> None:
    folder = write(tmp_path / "index", config_of(QWEN), trunk(QWEN), shards=2)
    write_file(folder / "mtp.safetensors", heads(QWEN))
    report = inspect.run(InspectOptions(model=str(folder)))
    assert report.data["heads"]["verdict"] == "alive"
    assert "are in mtp.safetensors, but not in the index: vLLM" in findings_about(report.data, "index")[0]
    entry, more = ZOO["mimo"], {"model.mtp_layers.0.surprise.weight": ("BF16", (H,))}
    data = inspect_data(tmp_path / "more", config_of(entry), trunk(entry) | heads(entry) | more)
    assert (data["heads"]["verdict"], data["heads"]["extra"]) == ("alive", list(more))
    config = {**SIZES, "model_type": "brand_new", "num_nextn_predict_layers": 1}
    data = inspect_data(tmp_path / "new", config, trunk(QWEN) | {"model.layers.4.eh_proj.weight": ("BF16", (H, 2 * H))})
    assert data["heads"]["verdict"] == "alive" and "were not checked" in data["heads"]["reason"]


def test_native_head_is_compared_with_a_target(tmp_path: Path) -> None:
    whole = trunk(QWEN) | heads(QWEN)
    same = write(tmp_path / "same", config_of(QWEN), trunk(QWEN))
    wider = config_of(QWEN)
    wider["text_config"]["intermediate_size"] = 48
    other = write(tmp_path / "other", wider, trunk(QWEN))
    assert inspect_data(tmp_path / "m", config_of(QWEN), whole, target=str(same))["fit"]["fits"]
    assert not inspect_data(tmp_path / "n", config_of(QWEN), trunk(QWEN), target=str(same))["fit"]["fits"]  # no head
    fit = inspect_data(tmp_path / "m", config_of(QWEN), whole, target=str(other))["fit"]
    assert not fit["fits"] and "mtp.layers.0.mlp.up_proj.weight" in [each["what"] for each in fit["checks"]]


def test_attached_head_is_inspected_and_fitted(tmp_path: Path) -> None:
    ids = np.arange(5, dtype=np.int64)
    head = HeadCheckpoint(spec=HeadSpec(kind="medusa"), hidden_size=8, vocab_size=131, draft_token_ids=ids)
    arrays = {"medusa.0.weight": np.ones((8, 8), np.float32), "medusa.0.bias": np.ones(8, np.float32)}
    write_head(tmp_path / "head", head, arrays)
    trunk_path = str(write_tiny("llama", tmp_path / "trunk"))
    report = inspect.run(InspectOptions(model=trunk_path, head=str(tmp_path / "head")))
    assert report.data["attached_head"]["draft_vocab_size"] == 5
    assert report.data["attached_head"]["parameters"] == 72 and "5 draft tokens" in "\n".join(report.lines)
    assert not report.ok and report.data["attached_head"]["fit"]["fits"] is False  # the head has hidden size 8
    alone = inspect.run(InspectOptions(model=str(tmp_path / "head"), target=trunk_path))
    assert alone.data["drafter"]["kind"] == "medusa" and not alone.ok
    with pytest.raises(UsageError, match="is not a head directory"):
        inspect.run(InspectOptions(model=trunk_path, head=trunk_path))


# GGUF files


def write_gguf(path: Path, nextn: int, drop: str = "", blocks: int = 3, joined: int = 0) -> Path:
    writer = gguf.GGUFWriter(path, "glm4moe")
    writer.add_block_count(blocks)
    writer.add_embedding_length(H)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if nextn:
        writer.add_uint32("glm4moe.nextn_predict_layers", nextn)
    names = {"token_embd.weight": (V, H), "output_norm.weight": (H,)}
    for block in range(blocks):
        names |= {f"blk.{block}.{n}.weight": (H, H) for n in ("attn_q", "attn_output", "ffn_up", "ffn_down")}
    last = f"blk.{blocks - 1}.nextn"
    names |= {f"{last}.{norm}.weight": (H,) for norm in ("enorm", "hnorm", "shared_head_norm")}
    names |= {f"{last}.eh_proj.weight": (H, joined or 2 * H)}
    for name, shape in names.items():
        if not drop or drop not in name:
            writer.add_tensor(name, np.zeros(shape, np.float32))
    return gguf_files.written(writer, path)


@pytest.mark.parametrize(
    ("nextn", "drop", "verdict"),
    [(1, "", "alive"), (1, "blk.2.", "stripped"), (1, "blk.2.ffn_down", "partial"), (1, "hnorm", "partial"),
     (0, "blk.2.", "none")],
)  # fmt: skip
def test_verdicts_of_gguf_files(tmp_path: Path, nextn: int, drop: str, verdict: str) -> None:
    report = inspect.run(InspectOptions(model=str(write_gguf(tmp_path / "m.gguf", nextn, drop))))
    assert report.data["heads"]["verdict"] == verdict, report.data["heads"]["reason"]
    assert report.data["format"] == "gguf" and report.ok is (verdict in ("alive", "none"))
    assert report.data["family"]["key"] == "glm4_moe"


# The command


def test_command_prints_the_verdict_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write(tmp_path / "a", config_of(QWEN), trunk(QWEN) | heads(QWEN))
    stripped = write(tmp_path / "b", config_of(QWEN), trunk(QWEN))
    assert main(["inspect", str(whole)]) == 0 and "MTP: ALIVE" in capsys.readouterr().out
    assert main(["inspect", str(stripped)]) == 1 and "fix: put it back" in capsys.readouterr().out
    assert main(["inspect", str(stripped), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {
        "schema", "model", "format", "files", "architecture", "family", "sizes", "context_length", "sampling",
        "speculation", "here",
        "quantization", "tied_embeddings", "parts", "total", "heads", "findings", "drafter", "fit", "attached_head",
        "deep",
    }  # fmt: skip
    assert set(document["heads"]) == {
        "verdict", "reason", "fix", "broken", "declared", "declared_by", "modules", "extra", "embedding", "lm_head",
        "norm", "concat",
    }  # fmt: skip


@pytest.mark.slow
def test_deep_finds_a_dead_head(tmp_path: Path) -> None:
    report = inspect.run(InspectOptions(model=str(write_tiny("mimo", tmp_path)), deep=True))
    deep = report.data["deep"]
    assert report.data["heads"]["verdict"] == "dead"  # complete, with random weights
    text = "\n".join(report.lines)
    assert deep["ran"] and deep["dead"] and not report.ok and "head is dead" in text and "ALIVE" not in text
    assert [row["depth"] for row in deep["depths"]] == [1, 2, 3] and deep["tokens"] > 300
    assert [len(row["per_position"]) for row in deep["depths"]] == [1, 2, 3]


def test_deep_gives_the_reason_when_it_cannot_run(tmp_path: Path) -> None:
    entry = ZOO["pangu_ultra_moe"]
    data = inspect_data(tmp_path / "a", config_of(entry), trunk(entry), deep=True)
    assert data["deep"]["ran"] is False and "pangu_ultra_moe" in data["deep"]["why"]
    write(tmp_path / "d", {"model_type": "eagle", **SIZES}, {"fc.weight": ("BF16", (H, 2 * H))})
    data = inspect.run(InspectOptions(model=str(tmp_path / "d"), deep=True)).data
    assert "--target" in data["deep"]["why"]


def test_files_written_by_save_are_inspected(tmp_path: Path) -> None:
    safetensors.save(tmp_path / "model.safetensors", {"model.norm.weight": np.ones(H, np.float32)})
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))
    assert inspect.run(InspectOptions(model=str(tmp_path))).data["total"]["parameters"] == H


@pytest.mark.skipif(cached_trunk() is None, reason="the default model is not in the cache")
def test_default_model_has_its_shipped_head() -> None:
    data = inspect.run(InspectOptions()).data
    assert data["attached_head"]["kind"] == "eagle3" and data["attached_head"]["fit"]["fits"]
