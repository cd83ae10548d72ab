"""`headstart graft`: trunks keep their bytes, heads come back whole, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from checkpoints import Raw, raw, read_raw, tensor, write_checkpoint

from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.errors import ModelError, UsageError
from headstart.formats.base import make_tensor
from headstart.formats.safetensors import Array, bfloat16
from headstart.machine import Memory
from headstart.tools.graft import run as graft
from headstart.tools.graft.describe import nearest_e4m3
from headstart.tools.graft.run import BESIDE, GraftOptions, run
from headstart.tools.tiny import write_tiny

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
    """By the index where there is one, so that what it does not name does not count."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_raw(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {file: read_raw(folder / file) for file in set(weight_map.values())}
    assert sum(map(len, files.values())) == len(weight_map)
    return {name: files[file][name] for name, file in weight_map.items()}


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", CONFIG, {**TRUNK, **HEAD})


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """Other weights in the trunk, no head, no promise."""
    trunk = TRUNK | {"lm_head.weight": tensor("BF16", V, H, seed=7)}
    return write_checkpoint(tmp_path / "tuned", {**CONFIG, "num_nextn_predict_layers": 0, "mine": 1}, trunk, shards=2)


TOWERS: dict[str, Array] = {
    "audio_tower.layers.0.fc1.weight": tensor("BF16", F, H, seed=2),
    "model.visual.encoder.layers.5.fc1.weight": tensor("BF16", F, H, seed=3),
}


def test_layers_of_other_towers_are_no_head(base: Path, tmp_path: Path) -> None:
    """Though a tower may have more layers than the trunk, and may come first."""
    nested = {name.replace("model.", "model.language_model.", 1): array for name, array in TRUNK.items()}
    tuned = write_checkpoint(tmp_path / "tuned", {"text_config": CONFIG}, {**nested, **TOWERS})
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    head = {name.replace("model.", "model.language_model.", 1): raw(array) for name, array in HEAD.items()}
    assert all_tensors(tmp_path / "out") == all_tensors(tuned) | head
    run(GraftOptions(model=str(tmp_path / "out"), out=tmp_path / "bare", strip=True))
    assert all_tensors(tmp_path / "bare") == all_tensors(tuned)


def test_the_head_comes_back_and_the_trunk_is_shared(base: Path, tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run(GraftOptions(model=str(tuned), base=str(base), out=out))
    assert all_tensors(out) == all_tensors(tuned) | {name: raw(array) for name, array in HEAD.items()}
    assert config_of(out) == {**CONFIG, "mine": 1}
    for file in tuned.glob("*.safetensors"):
        assert file.samefile(out / file.name)
    assert report.data["acceptance"]["verdict"].startswith("acceptance not measured: config.json: ")


def test_a_family_that_does_not_run_here_is_not_measured(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "other", {**CONFIG, "model_type": "hy_v4"}, TRUNK)
    assert "hy_v4 does not run here" in graft.measure(folder, lambda done, total, text: None)["verdict"]


def test_where_the_head_came_from_is_written_down(base: Path, tuned: Path, tmp_path: Path) -> None:
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    written = json.loads((tmp_path / "out" / graft.PROVENANCE).read_text())
    assert written["head"]["name"] == str(base)
    assert written["head_tensors"] == len(HEAD)
    assert written["head_sha256"] == graft._sha256(tmp_path / "out" / written["head_file"])
    assert written["config_keys"] == {"num_nextn_predict_layers": 1}


def test_strip_and_graft_are_inverse(base: Path, tmp_path: Path) -> None:
    run(GraftOptions(model=str(base), strip=True, out=tmp_path / "bare"))
    assert all_tensors(tmp_path / "bare") == {name: raw(array) for name, array in TRUNK.items()}
    assert config_of(tmp_path / "bare") == {**CONFIG, "num_nextn_predict_layers": 0}
    run(GraftOptions(model=str(tmp_path / "bare"), base=str(base), out=tmp_path / "whole"))
    assert all_tensors(tmp_path / "whole") == all_tensors(base)
    assert config_of(tmp_path / "whole") == config_of(base)


def test_half_a_head_is_replaced(base: Path, tmp_path: Path) -> None:
    half = {name: array for name, array in HEAD.items() if "eh_proj" not in name}
    write_checkpoint(tmp_path / "half", CONFIG, {**TRUNK, **half})
    report = run(GraftOptions(model=str(tmp_path / "half"), base=str(base), out=tmp_path / "out"))
    assert all_tensors(tmp_path / "out") == all_tensors(base)
    assert "3 tensors of an incomplete head were replaced" in report.data["notes"]


def test_a_text_only_fine_tune_of_a_wrapped_model(tmp_path: Path) -> None:
    inner = {key: value for key, value in CONFIG.items() if key != "model_type"}
    wrapped = {"model_type": "deepseek_v3", "text_config": {**inner, "model_type": "deepseek_v3_text"}}
    moved = {name.replace("model.", "model.language_model.", 1): array for name, array in {**TRUNK, **HEAD}.items()}
    write_checkpoint(tmp_path / "base", wrapped, moved)
    write_checkpoint(tmp_path / "tuned", {**CONFIG, "num_nextn_predict_layers": 0}, TRUNK, shards=1, index=False)
    (tmp_path / "tuned" / "model-00001-of-00001.safetensors").rename(tmp_path / "tuned" / "model.safetensors")
    run(GraftOptions(model=str(tmp_path / "tuned"), base=str(tmp_path / "base"), out=tmp_path / "out"))
    assert all_tensors(tmp_path / "out").keys() == TRUNK.keys() | HEAD.keys()
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 1
    assert not (tmp_path / "out" / "model.safetensors").exists()  # readers that find it look no further


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
def test_engines_are_told_that_the_head_is_not_quantized(method: str, base: Path, tmp_path: Path) -> None:
    quantization, key = QUANTIZED[method]
    tuned = write_checkpoint(tmp_path / "tuned", {**CONFIG, "quantization_config": quantization}, TRUNK)
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    told = config_of(tmp_path / "out")["quantization_config"]
    names = [r"-:^model\.layers\.1\.eh_proj$"] if method == "gptq" else ["model.layers.1.eh_proj"]
    assert set(names) <= set(told[key])
    assert set(quantization.get(key, [])) <= set(told[key])


def test_a_quantized_head_in_a_plain_model_becomes_plain(tuned: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    quantized = {**HEAD, name: tensor("F8_E4M3", 130, 200), f"{name}_scale_inv": np.ones((2, 2), np.float32)}
    base = write_checkpoint(tmp_path / "fp8", CONFIG, {**TRUNK, **quantized})
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    found = all_tensors(tmp_path / "out")
    assert found[name][:2] == ("BF16", (130, 200))
    assert f"{name}_scale_inv" not in found


def test_a_head_quantized_as_the_target_stays_so(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    name = "model.layers.1.self_attn.o_proj.weight"
    head = {**HEAD, name: tensor("F8_E4M3", 130, 200), f"{name}_scale_inv": np.ones((2, 2), np.float32)}
    base = write_checkpoint(tmp_path / "base", config, {**TRUNK, **head})
    tuned = write_checkpoint(tmp_path / "tuned", {**config, "num_nextn_predict_layers": 0}, TRUNK)
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    assert all_tensors(tmp_path / "out") == all_tensors(base)
    assert config_of(tmp_path / "out") == config_of(base)


def test_quantized_heads_are_fp8_blocks(base: Path, tuned: Path, tmp_path: Path) -> None:
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out", quantize_head=True))
    found = all_tensors(tmp_path / "out")
    name = "model.layers.1.self_attn.o_proj.weight"
    dtype, shape, codes = found[name]
    assert (dtype, shape) == ("F8_E4M3", (130, 200))
    scale = np.frombuffer(found[f"{name}_scale_inv"][2], np.float32).reshape(2, 2)
    values = make_tensor(name, shape, dtype, np.frombuffer(codes, np.uint8)).float32()
    again = values * np.repeat(np.repeat(scale, 128, 0), 128, 1)[:130, :200]
    exact = make_tensor(name, shape, "BF16", np.frombuffer(raw(HEAD[name])[2], np.uint8)).float32()
    assert np.abs(again - exact).max() <= np.abs(exact).max() / 448 * 16  # half a step of the top binade
    assert found["model.layers.1.eh_proj.weight"] == raw(HEAD["model.layers.1.eh_proj.weight"])
    told = config_of(tmp_path / "out")["quantization_config"]
    assert told["weight_block_size"] == [128, 128]
    assert {"model.layers.0.mlp.up_proj", "model.layers.1.eh_proj", "lm_head"} <= set(told["modules_to_not_convert"])
    assert "model.layers.1.self_attn.o_proj" not in told["modules_to_not_convert"]


def test_nearest_e4m3() -> None:
    sizes = make_tensor("", (127,), "F8_E4M3", np.arange(127, dtype=np.uint8)).float32()
    values = np.concatenate((sizes, -sizes, [500, (sizes[8] + sizes[9]) / 2, (sizes[9] + sizes[10]) / 2]))
    codes = nearest_e4m3(values.astype(np.float32))
    assert codes[:127].tolist() == list(range(127))
    assert codes[127:254].tolist() == [128 + code for code in range(127)]
    assert codes[254:].tolist() == [126, 8, 10]


def test_no_second_quantization(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**CONFIG, "num_nextn_predict_layers": 0, "quantization_config": {"quant_method": "awq"}}
    tuned = write_checkpoint(tmp_path / "tuned", config, TRUNK)
    out = str(tmp_path / "out")
    assert main(["graft", str(tuned), "--from", str(base), "--quantize-head", "-o", out]) == 2
    assert "quantized by 'awq'" in capsys.readouterr().err


def other(change: str, folder: Path) -> Path:
    """A checkpoint that no head of `base` fits."""
    config: dict[str, Any] = {**CONFIG, "num_nextn_predict_layers": 0}
    tensors = dict(TRUNK)
    config |= {"type": {"model_type": "glm4_moe"}, "layers": {"num_hidden_layers": 2}, "vocab": {"vocab_size": 13}}.get(
        change, {}
    )
    if change == "shape":
        tensors["model.embed_tokens.weight"] = tensor("BF16", V + 1, H)
    if change == "norms":
        tensors |= {n: bfloat16(np.full(H, -0.05, np.float32)) for n in tensors if "norm" in n}
    made = write_checkpoint(folder, config, tensors)
    if change == "tokens":
        (made / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 1, "b": 0}}}))
    return made


def test_modelopts_own_file_is_told_too(base: Path, tuned: Path, tmp_path: Path) -> None:
    document = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tuned / "hf_quant_config.json").write_text(json.dumps(document))
    run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    told = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert told["producer"] == document["producer"] and told["quantization"]["quant_algo"] == "FP8"
    assert {"lm_head", "model.layers.1.eh_proj"} <= {*told["quantization"]["exclude_modules"]}
    with pytest.raises(UsageError, match="quantized by 'modelopt'"):
        run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "other", quantize_head=True))


def test_a_head_with_an_indexer_fits_trunks_with_one(tmp_path: Path) -> None:
    """Both call themselves by one model type."""
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


def test_keys_go_where_the_target_describes_its_language_model(base: Path, tmp_path: Path) -> None:
    inner = {key: value for key, value in CONFIG.items() if key != "num_nextn_predict_layers"}
    wrapped = {"model_type": "deepseek_v3", "text_config": {**inner, "model_type": "deepseek_v3_text"}}
    moved = {name.replace("model.", "model.language_model.", 1): array for name, array in TRUNK.items()}
    model = write_checkpoint(tmp_path / "wrapped", wrapped, moved)
    run(GraftOptions(model=str(model), base=str(base), out=tmp_path / "out", no_measure=True))
    config = config_of(tmp_path / "out")
    assert config["text_config"]["num_nextn_predict_layers"] == 1 and "num_nextn_predict_layers" not in config


def test_folders_come_along_without_weights(base: Path, tuned: Path, tmp_path: Path) -> None:
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
    assert "original/consolidated.00.pth" in notes and "2 weight files share their bytes" in notes
    (out / "assets" / "mine").write_text("x")
    with pytest.raises(UsageError, match="holds assets/mine"):
        run(GraftOptions(model=str(tuned), base=str(base), out=out, no_measure=True, force=True))


def test_what_would_not_fit_into_memory_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny("mimo", tmp_path / "m")
    assert BESIDE < graft.memory_needed(folder) < BESIDE + 10_000_000
    monkeypatch.setattr(graft.machine, "memory", lambda: Memory(10**9, BESIDE, None))
    verdict = graft.measure(folder, lambda done, total, text: None)["verdict"]
    assert "about 0.4 GB" in verdict and "headstart inspect --deep" in verdict


REFUSED = {
    "type": "is a glm4_moe model",
    "layers": "num_hidden_layers is 2",
    "vocab": "vocab_size is 13",
    "shape": "embed_tokens.weight is [13, 8]",
    "norms": "one stores w, the other 1 + w",
    "tokens": "2 tokens have other ids",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_does_not_fit_is_refused(
    change: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (base / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    model = other(change, tmp_path / "other")
    assert main(["graft", str(model), "--from", str(base), "-o", str(tmp_path / "out")]) == 2
    assert REFUSED[change] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_wrong_usage(base: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("-o", str(tmp_path / "out"))
    cases = {
        ("graft", str(tuned), *out): "neither --from nor --strip",
        ("graft", str(tuned), "--from", str(base), "--strip", *out): "both given",
        ("graft", str(base), "--from", str(base), *out): "has its head",
        ("graft", str(tuned), "--from", str(tuned), *out): "no MTP head to take",
        ("graft", str(tuned), "--strip", *out): "has no MTP head",
        ("graft", str(tuned), "--from", str(base), "-o", str(base), "--force"): "holds the source",
        ("graft", str(tuned), "--from", str(base), "-o", str(tmp_path), "--force"): "holds the source",
    }
    for arguments, said in cases.items():
        assert main(arguments) == 2
        assert said in capsys.readouterr().err
    assert base.exists()


def test_a_fine_tune_with_other_positions_is_noted(base: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "num_nextn_predict_layers": 0, "rope_theta": 5e5}
    tuned = write_checkpoint(tmp_path / "tuned", config, TRUNK)
    report = run(GraftOptions(model=str(tuned), base=str(base), out=tmp_path / "out"))
    assert any("rope_theta is 500000.0 here" in note for note in report.data["notes"])


def test_a_family_that_runs_here_is_measured(tmp_path: Path) -> None:
    """Strip the head of a tiny MiMo, graft it back: the same tokens and the same drafts."""
    config, arrays = support.family_of("mimo").tiny(num_hidden_layers=2)
    whole = support.write_model(tmp_path / "whole", config, arrays)
    run(GraftOptions(model=str(whole), strip=True, out=tmp_path / "bare"))
    report = run(GraftOptions(model=str(tmp_path / "bare"), base=str(whole), out=tmp_path / "again"))
    assert report.data["acceptance"]["drafts"] > 0
    assert report.data["acceptance"]["verdict"].startswith("acceptance length 1.")
    settings: dict[str, Any] = {"threads": 1, "max_model_len": 96, "drafter": "mtp", "depth": 1}
    prompts = [support.prompt_of(12, seed) for seed in range(3)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    runs = [
        LLM(str(tmp_path / name), EngineConfig(**settings)).generate(prompts, params) for name in ("whole", "again")
    ]
    assert [each.token_ids for each in runs[0]] == [each.token_ids for each in runs[1]]
    assert [each.speculation for each in runs[0]] == [each.speculation for each in runs[1]]
    bare = LLM(str(tmp_path / "bare"), EngineConfig(**{**settings, "drafter": "none"})).generate(prompts, params)
    assert [each.token_ids for each in bare] == [each.token_ids for each in runs[0]]
