"""`headstart graft`: trunks keep their bytes, heads are copied, mismatches are refused."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from checkpoints import Raw, raw, read_raw, tensor, write_checkpoint
from lora_files import write_adapter
from tiny_models import write_tiny

from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.load import MEMORY_EXTRA, memory_needed
from headstart.errors import ModelError, UsageError
from headstart.formats import open_checkpoint
from headstart.formats.base import make_tensor
from headstart.formats.safetensors import Array, bfloat16
from headstart.machine import Memory
from headstart.tools.graft import run as graft
from headstart.tools.graft.describe import nearest_e4m3
from headstart.tools.graft.run import GraftOptions, run

H, V, F = 8, 12, 16
CONFIG = {
    "model_type": "deepseek_v3", "num_hidden_layers": 1, "hidden_size": H, "vocab_size": V,
    "num_nextn_predict_layers": 1, "rope_theta": 10000.0,
}  # fmt: skip
TRUNK: dict[str, Array] = {
    "model.embed_tokens.weight": tensor("BF16", V, H),
    "model.norm.weight": bfloat16(np.full(H, 1.0, np.float32)),
    "model.layers.0.input_layernorm.weight": bfloat16(np.full(H, 0.9, np.float32)),
    "model.layers.0.mlp.up_proj.weight": tensor("BF16", F, H),
    "lm_head.weight": tensor("BF16", V, H, seed=1),
}
HEAD: dict[str, Array] = {
    "model.layers.1.enorm.weight": tensor("BF16", H),
    "model.layers.1.eh_proj.weight": tensor("BF16", H, 2 * H),
    "model.layers.1.self_attn.o_proj.weight": tensor("BF16", 130, 200),
    "model.layers.1.mlp.gate.weight": tensor("BF16", 2, H),
}


def all_tensors(folder: Path) -> dict[str, Raw]:
    """The tensors named by the index."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: read_raw(folder / file) for file in set(weight_map.values())}
    assert sum(map(len, files.values())) == len(weight_map)
    return {name: files[file][name] for name, file in weight_map.items()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", CONFIG, {**TRUNK, **HEAD})


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A fine-tune with another LM head, no MTP head and no declared modules."""
    trunk = TRUNK | {"lm_head.weight": tensor("BF16", V, H, seed=7)}
    return write_checkpoint(tmp_path / "tuned", {**CONFIG, "num_nextn_predict_layers": 0, "mine": 1}, trunk, shards=2)


def in_language_model(tensors: dict[str, Array]) -> dict[str, Array]:
    return {name.replace("model.", "model.language_model.", 1): array for name, array in tensors.items()}


def multimodal_config(config: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "deepseek_v3", "text_config": {**config, "model_type": "deepseek_v3_text"}}


TOWERS: dict[str, Array] = {
    "audio_tower.layers.0.fc1.weight": tensor("BF16", F, H, seed=2),
    "model.visual.encoder.layers.5.fc1.weight": tensor("BF16", F, H, seed=3),
}


def test_layers_of_other_towers_are_not_taken_for_a_head(base: Path, tmp_path: Path) -> None:
    """A tower may have more layers than the trunk and may come first."""
    tuned = write_checkpoint(tmp_path / "tuned", {"text_config": CONFIG}, {**in_language_model(TRUNK), **TOWERS})
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    head = {name: raw(array) for name, array in in_language_model(HEAD).items()}
    assert all_tensors(tmp_path / "out") == all_tensors(tuned) | head
    run(GraftOptions(model=str(tmp_path / "out"), out=tmp_path / "bare", strip=True))
    assert all_tensors(tmp_path / "bare") == all_tensors(tuned)


def test_head_is_grafted_and_trunk_files_are_hard_links(base: Path, tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run(GraftOptions(model=str(tuned), base=str(base), out=out))
    assert all_tensors(out) == all_tensors(tuned) | {name: raw(array) for name, array in HEAD.items()}
    assert config_of(out) == {**CONFIG, "mine": 1}
    for file in tuned.glob("*.safetensors"):
        assert file.samefile(out / file.name)
    assert report.data["acceptance"]["verdict"].startswith("acceptance not measured: config.json: ")
    written = json.loads((out / graft.PROVENANCE).read_text())  # origin of the head
    assert (written["head"]["name"], written["head_tensors"]) == (str(base), len(HEAD))
    assert written["head_sha256"] == hashlib.sha256((out / written["head_file"]).read_bytes()).hexdigest()
    assert written["config_keys"] == {"num_nextn_predict_layers": 1}


def test_unsupported_family_is_not_measured(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "other", {**CONFIG, "model_type": "pangu_ultra_moe"}, TRUNK)
    assert "pangu_ultra_moe does not run here" in graft.measure(folder, lambda done, total, text: None)["verdict"]


def test_strip_and_graft_are_inverse(base: Path, tmp_path: Path) -> None:
    run(GraftOptions(model=str(base), strip=True, out=tmp_path / "bare"))
    assert all_tensors(tmp_path / "bare") == {name: raw(array) for name, array in TRUNK.items()}
    assert config_of(tmp_path / "bare") == {**CONFIG, "num_nextn_predict_layers": 0}
    run(GraftOptions(model=str(tmp_path / "bare"), base=str(base), out=tmp_path / "whole"))
    assert all_tensors(tmp_path / "whole") == all_tensors(base) and config_of(tmp_path / "whole") == config_of(base)


def test_incomplete_head_is_replaced(base: Path, tmp_path: Path) -> None:
    half = {name: array for name, array in HEAD.items() if "eh_proj" not in name}
    write_checkpoint(tmp_path / "half", CONFIG, {**TRUNK, **half})
    report = run(GraftOptions(model=str(tmp_path / "half"), base=str(base), out=tmp_path / "out"))
    assert all_tensors(tmp_path / "out") == all_tensors(base)
    assert "3 tensors of an incomplete head were replaced" in report.data["notes"]


def test_text_only_fine_tune_of_a_multimodal_model_is_grafted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base", multimodal_config(CONFIG), in_language_model({**TRUNK, **HEAD}))
    write_checkpoint(tmp_path / "tuned", {**CONFIG, "num_nextn_predict_layers": 0}, TRUNK, shards=1, index=False)
    (tmp_path / "tuned" / "model-00001-of-00001.safetensors").rename(tmp_path / "tuned" / "model.safetensors")
    run(GraftOptions(model=str(tmp_path / "tuned"), base=str(tmp_path / "base"), out=tmp_path / "out"))
    assert all_tensors(tmp_path / "out").keys() == TRUNK.keys() | HEAD.keys()
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 1
    assert not (tmp_path / "out" / "model.safetensors").exists()  # readers would prefer it to the index


QUANTIZED = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "modules_to_not_convert"),
    "awq": ({"quant_method": "awq", "modules_to_not_convert": ["lm_head"]}, "modules_to_not_convert"),
    "compressed-tensors": ({"quant_method": "compressed-tensors", "ignore": ["lm_head"]}, "ignore"),
    "gptq": ({"quant_method": "gptq"}, "dynamic"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"]}, "llm_int8_skip_modules"),
    "bitsandbytes without its name": ({"load_in_4bit": True}, "llm_int8_skip_modules"),
    "auto-round": ({"quant_method": "auto-round", "extra_config": {"lm_head": {"bits": 16}}}, "extra_config"),
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_head_is_added_to_the_quantization_ignore_list(method: str, base: Path, tmp_path: Path) -> None:
    quantization, key = QUANTIZED[method]
    tuned = write_checkpoint(tmp_path / "tuned", {**CONFIG, "quantization_config": quantization}, TRUNK)
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    written = config_of(tmp_path / "out")["quantization_config"]
    names = [r"-:^model\.layers\.1\.eh_proj$"] if method == "gptq" else ["model.layers.1.eh_proj"]
    assert set(names) <= set(written[key]) and set(quantization.get(key, [])) <= set(written[key])


MATRIX = "model.layers.1.self_attn.o_proj.weight"


def test_fp8_head_is_dequantized_unless_the_target_has_fp8(tuned: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    head = {**HEAD, MATRIX: tensor("F8_E4M3", 130, 200), f"{MATRIX}_scale_inv": np.ones((2, 2), np.float32)}
    base = write_checkpoint(tmp_path / "fp8", config, {**TRUNK, **head})
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    found = all_tensors(tmp_path / "out")
    assert found[MATRIX][:2] == ("BF16", (130, 200)) and f"{MATRIX}_scale_inv" not in found
    same = write_checkpoint(tmp_path / "same", {**config, "num_nextn_predict_layers": 0}, TRUNK)
    run(GraftOptions(model=str(same), base=str(base), out=tmp_path / "again"))
    assert all_tensors(tmp_path / "again") == all_tensors(base) and config_of(tmp_path / "again") == config_of(base)


def test_quantize_head_writes_fp8_blocks(base: Path, tuned: Path, tmp_path: Path) -> None:
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out", quantize_head=True))
    found = all_tensors(tmp_path / "out")
    dtype, shape, codes = found[MATRIX]
    assert (dtype, shape) == ("F8_E4M3", (130, 200))
    scale = np.frombuffer(found[f"{MATRIX}_scale_inv"][2], np.float32).reshape(2, 2)
    values = make_tensor(MATRIX, shape, dtype, np.frombuffer(codes, np.uint8)).float32()
    restored = values * np.repeat(np.repeat(scale, 128, 0), 128, 1)[:130, :200]
    exact = make_tensor(MATRIX, shape, "BF16", np.frombuffer(raw(HEAD[MATRIX])[2], np.uint8)).float32()
    assert np.abs(restored - exact).max() <= np.abs(exact).max() / 448 * 16  # half a step of the top binade
    assert found["model.layers.1.eh_proj.weight"] == raw(HEAD["model.layers.1.eh_proj.weight"])
    written = config_of(tmp_path / "out")["quantization_config"]
    kept = written["modules_to_not_convert"]
    assert written["weight_block_size"] == [128, 128] and MATRIX.removesuffix(".weight") not in kept
    assert {"model.layers.0.mlp.up_proj", "model.layers.1.eh_proj", "lm_head"} <= set(kept)


def test_nearest_e4m3_rounds_as_pytorch() -> None:
    """Values beyond the range become the largest value."""
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * 100
    codes = torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert nearest_e4m3(values).tolist() == codes.tolist()
    ties = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float().unfold(0, 2, 1).mean(1)
    assert nearest_e4m3(ties.numpy()).tolist() == ties.to(torch.float8_e4m3fn).view(torch.uint8).tolist()


def test_head_is_added_to_hf_quant_config(base: Path, tuned: Path, tmp_path: Path) -> None:
    document = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tuned / "hf_quant_config.json").write_text(json.dumps(document))
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert written["producer"] == document["producer"] and written["quantization"]["quant_algo"] == "FP8"
    assert {"lm_head", "model.layers.1.eh_proj"} <= {*written["quantization"]["exclude_modules"]}
    with pytest.raises(UsageError, match="quantized by 'modelopt'"):
        run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "other", quantize_head=True))
    config = {**CONFIG, "num_nextn_predict_layers": 0, "quantization_config": {"quant_method": "awq"}}
    packed = write_checkpoint(tmp_path / "awq", config, TRUNK)
    with pytest.raises(UsageError, match="quantized by 'awq'"):
        run(GraftOptions(model=str(packed), base=str(base), out=tmp_path / "other", quantize_head=True))


def test_head_with_an_indexer_needs_a_trunk_with_one(tmp_path: Path) -> None:
    """Trunks with and without an indexer share a model type."""
    names = ("self_attn.q_proj.weight", "self_attn.indexer.wk.weight")
    plain, sparse = ({f"model.layers.0.{name}": tensor("BF16", H, H) for name in names[:count]} for count in (1, 2))
    head = {f"model.layers.1.{name}": tensor("BF16", H, H) for name in names}
    bare = {**CONFIG, "num_nextn_predict_layers": 0}
    base = write_checkpoint(tmp_path / "sparse", CONFIG, {**TRUNK, **HEAD, **sparse, **head})
    dense = write_checkpoint(tmp_path / "dense", CONFIG, {**TRUNK, **HEAD, **plain})
    for kind, donor, tensors in (("a", base, plain), ("b", dense, sparse)):
        model = write_checkpoint(tmp_path / kind, bare, {**TRUNK, **tensors})
        with pytest.raises(ModelError, match=r"self_attn.indexer.wk, which no layer of"):
            run(GraftOptions(model=str(model), base=str(donor), out=tmp_path / "out"))
    model = write_checkpoint(tmp_path / "c", bare, {**TRUNK, **sparse})
    run(GraftOptions(model=str(model), base=str(base), out=tmp_path / "out", no_measure=True))


def test_config_keys_are_written_into_text_config(base: Path, tmp_path: Path) -> None:
    inner = {key: value for key, value in CONFIG.items() if key != "num_nextn_predict_layers"}
    model = write_checkpoint(tmp_path / "wrapped", multimodal_config(inner), in_language_model(TRUNK))
    run(GraftOptions(model=str(model), base=str(base), out=tmp_path / "out", no_measure=True))
    config = config_of(tmp_path / "out")
    assert config["text_config"]["num_nextn_predict_layers"] == 1 and "num_nextn_predict_layers" not in config


def test_folders_are_copied_without_weights(base: Path, tuned: Path, tmp_path: Path) -> None:
    for name in ("assets/icons/a.svg", "original/params.json", "original/consolidated.00.pth", ".cache/x.json"):
        (tuned / name).parent.mkdir(parents=True, exist_ok=True)
        (tuned / name).write_text(name)
    out = tmp_path / "out"
    for force in (False, True):
        report = run(GraftOptions(model=str(tuned), base=str(base), out=out, no_measure=True, force=force))
    there = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {"assets/icons/a.svg", "original/params.json"} <= there and not any(".pth" in name for name in there)
    assert ".cache/x.json" not in there
    notes = "\n".join(report.data["notes"])
    assert "original/consolidated.00.pth" in notes and "/tuned: 2; replace such a file" in notes
    (out / "assets" / "mine").write_text("x")
    with pytest.raises(UsageError, match="holds assets/mine"):
        run(GraftOptions(model=str(tuned), base=str(base), out=out, no_measure=True, force=True))


def test_model_larger_than_memory_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny("mimo", tmp_path / "m")
    assert MEMORY_EXTRA < memory_needed(open_checkpoint(folder)) < MEMORY_EXTRA + 10_000_000
    monkeypatch.setattr(graft.machine, "memory", lambda: Memory(10**9, MEMORY_EXTRA, None))
    verdict = graft.measure(folder, lambda done, total, text: None)["verdict"]
    assert "about 0.3 GB" in verdict and "headstart inspect --deep" in verdict


NORMS = {name: bfloat16(np.full(H, -0.05, np.float32)) for name in TRUNK if "norm" in name}


@pytest.mark.parametrize(("config", "tensors", "ids", "said"), [
    ({"model_type": "glm4_moe"}, {}, (0, 1), "is a glm4_moe model"),
    ({"num_hidden_layers": 2}, {}, (0, 1), "num_hidden_layers is 2"),
    ({"vocab_size": 13}, {}, (0, 1), "vocab_size is 13"),
    ({}, {"model.embed_tokens.weight": tensor("BF16", V + 1, H)}, (0, 1), "embed_tokens.weight is [13, 8]"),
    ({}, NORMS, (0, 1), "one stores w, the other 1 + w"),
    ({}, {}, (1, 0), "2 tokens have other ids"),
])  # fmt: skip
def test_mismatching_head_is_refused(
    config: dict[str, Any], tensors: dict[str, Array], ids: tuple[int, int], said: str, base: Path, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "other", {**CONFIG, "num_nextn_predict_layers": 0, **config}, TRUNK | tensors)
    for folder, (a, b) in ((base, (0, 1)), (model, ids)):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": a, "b": b}}}))
    with pytest.raises((ModelError, UsageError), match=re.escape(said)):
        run(GraftOptions(model=str(model), base=str(base), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_wrong_usage(base: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, adapter = ("-o", str(tmp_path / "out")), write_adapter({}, {"peft_type": "LORA"})
    cases = {
        ("graft", str(adapter), "--from", str(base), *out): "is a LoRA adapter, not a whole model",
        ("export", str(adapter), *out): "is a LoRA adapter, not a whole model",
        ("graft", str(tuned), *out): "neither --from nor --strip",
        ("graft", str(tuned), "--from", str(base), "--strip", *out): "both given",
        ("graft", str(base), "--from", str(base), *out): "already has a head",
        ("graft", str(tuned), "--from", str(tuned), *out): "no MTP head to take",
        ("graft", str(tuned), "--strip", *out): "has no MTP head",
        ("graft", str(tuned), "--from", str(base), "-o", str(base), "--force"): "holds the source",
        ("graft", str(tuned), "--from", str(base), "-o", str(tmp_path), "--force"): "holds the source",
    }
    for arguments, said in cases.items():
        assert main(arguments) == 2 and said in capsys.readouterr().err
    assert base.exists()


def test_changed_rope_theta_is_noted(base: Path, tmp_path: Path) -> None:
    tuned = write_checkpoint(tmp_path / "tuned", {**CONFIG, "num_nextn_predict_layers": 0, "rope_theta": 5e5}, TRUNK)
    report = run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    assert any("rope_theta is 500000.0 here" in note for note in report.data["notes"])


@pytest.mark.slow
def test_supported_family_is_measured_after_grafting(tmp_path: Path) -> None:
    """A tiny MiMo whose head is stripped and grafted back has the same tokens and drafts. In FP8 blocks the head drafts
    too."""
    whole = write_tiny("mimo", tmp_path / "whole", num_hidden_layers=2)
    run(GraftOptions(model=str(whole), strip=True, out=tmp_path / "bare"))
    report = run(GraftOptions(model=str(tmp_path / "bare"), base=str(whole), out=tmp_path / "again"))
    assert report.data["acceptance"]["drafts"] > 0
    assert report.data["acceptance"]["verdict"].startswith("acceptance length 1.")
    settings: dict[str, Any] = {"threads": 1, "max_model_len": 96, "drafter": "mtp", "depth": 1}
    prompts = [support.prompt_of(12, seed) for seed in range(3)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    report = run(GraftOptions(model=str(tmp_path / "bare"), base=str(whole), out=tmp_path / "fp8", quantize_head=True))
    assert not any("headstart" in each for each in report.data["notes"]) and report.data["acceptance"]["drafts"] > 0
    names = ("whole", "again", "fp8")
    runs = [LLM(str(tmp_path / n), EngineConfig(**settings)).generate(prompts, params) for n in names]
    first, restored, rounded = ([(each.token_ids, each.speculation) for each in run] for run in runs)
    assert first == restored and [tokens for tokens, _ in first] == [tokens for tokens, _ in rounded]
    bare = LLM(str(tmp_path / "bare"), EngineConfig(**{**settings, "drafter": "none"})).generate(prompts, params)
    assert [each.token_ids for each in bare] == [tokens for tokens, _ in first]
