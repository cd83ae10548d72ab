"""Printed commands against the engines' argument definitions, over engines x models x heads x devices."""

import itertools
import json
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
from gguf import GGUFWriter

from headstart import registry
from headstart.errors import HeadstartError, UsageError
from headstart.formats.json_object import read_packaged
from headstart.tools.launch import prepare as launch
from headstart.tools.launch.arguments import argument_table, check_arguments, parse_version, published, rules
from headstart.tools.launch.spec import LaunchStep

ENGINES = registry.available("launchers")
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 151936, "draft_vocab_size": 32000},
    "eagle": {"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"], "hidden_size": 64},
    "dflash": {"architectures": ["DFlashDraftModel"], "block_size": 16, "hidden_size": 64},
    "dspark": {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "hidden_size": 64},
    "model": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936},
}
PLACES: dict[str, dict[str, Any]] = {
    "8 x H200": {"gpus": "h200x8"},
    "one H100, server": {"gpus": "h100", "settings": {"max_model_len": 4096, "max_num_seqs": 16}},
    "MI300X": {"gpus": "mi300xx8"},
    "2 nodes": {"gpus": "h200x8", "nodes": 2},
    "CPU": {"gpus": "none"},
    "by batch": {"gpus": "b200x8", "depth_by_batch": "[[1, 8, 2], [9, 64, 0]]", "depth": 2},
    "decode": {"gpus": "h200x8", "role": "decode"},
}
SMALL = {
    "deepseek_v3": {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, "num_attention_heads": 128},
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", "num_nextn_predict_layers": 1, "num_attention_heads": 64},
    "qwen3_5": {"model_type": "qwen3_5", "mtp_num_hidden_layers": 1, "num_attention_heads": 24},
    "mimo_v2_flash": {"model_type": "mimo_v2_flash", "num_nextn_predict_layers": 3, "num_attention_heads": 64},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36, "hidden_size": 4096},
}


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[str, str]], list[str]]:
    """(engine, command line) of each printed command, and the errors of refused combinations."""
    lines, refused, folder = [], [], tmp_path_factory.mktemp("grid")
    patched = pytest.MonkeyPatch()
    patched.setattr(launch, "read_facts", cache(launch.read_facts))  # every engine reads the same files
    patched.setattr(launch, "drafter_of", cache(launch.drafter_of))
    heads = [None, *(_write_config(folder / f"head-{name}", HEADS[name]) for name in HEADS)]
    for engine, model, head, place in itertools.product(ENGINES, _models(folder), heads, PLACES):
        if (engine == "llamacpp") != model.endswith(".gguf"):
            continue
        options = launch.LaunchOptions(engine=engine, model=model, head=head, **PLACES[place])
        try:
            prepared = launch.prepare(options)
        except HeadstartError as error:
            refused.append(f"{engine} {Path(model).name} {place}: {error}")
            continue
        lines += [(engine, shlex.join(step.words)) for step in prepared.plan.serve]
    patched.undo()
    return lines, refused


def _write_config(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _models(folder: Path) -> list[str]:
    path = folder / "m.gguf"
    writer = GGUFWriter(path, "qwen35")
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_uint32("qwen35.attention.head_count", 8)
    writer.add_tensor("blk.1.nextn.eh_proj.weight", np.zeros((32, 64), np.float32))
    return [str(gguf_files.written(writer, path)), *(_write_config(folder / name, SMALL[name]) for name in SMALL)]


@pytest.mark.slow
def test_printed_commands_match_the_argument_definitions(grid: tuple[Any, Any]) -> None:
    wrong, (lines, _) = [], grid
    for engine, line in lines:
        launcher = launch.launcher_of(engine)
        words, version = launcher.arguments_of(LaunchStep(tuple(shlex.split(line)))), parse_version(launcher.newest)
        checked = check_arguments(launcher, version, words, num_positional=2)
        wrong += [f"{line}\n  {error}" for error in checked.errors]
    assert not wrong, "\n".join(wrong)
    assert len(set(lines)) >= 200, len(set(lines))


REFUSED = (
    "does not run on", "no prefill nodes", "its depth is one number", "prefill and decode apart", "not a GGUF file",
    "is one machine", "drafts to one depth", "cannot draft with a head of kind", "has no model", "has no MTP head",
    "does not draft with the heads", "does not know", "has no flag for", "need a GPU", "runs on one machine",
    "no router for",
)  # fmt: skip
"""Why a combination may have no command: what the engine cannot do."""


def test_refused_combinations_have_a_known_reason(grid: tuple[Any, Any]) -> None:
    assert not [each for each in grid[1] if not any(reason in each for reason in REFUSED)]


FACTS = {"model.type", "model.modules", "device", "head.kind", "head.reduced_vocabulary", "head.max_drafts",
         "adaptive.steps"}  # fmt: skip
RULES = [(engine, rule) for engine in ENGINES for rule in rules(engine)]


@pytest.mark.parametrize(("engine", "rule"), RULES, ids=lambda item: getattr(item, "says", item))
def test_rules_name_existing_arguments(engine: str, rule: Any) -> None:
    known, named = argument_table(engine), published(engine)
    assert known is not None and named is not None
    for name in rule.when:
        flag = f"--{name.replace('_', '-')}"
        assert name in FACTS or name in known.kinds or name in named.arguments or flag in known.kinds, name
    assert rule.level in ("refuse", "note")


@pytest.mark.parametrize(
    ("engine", "line", "facts", "says"),
    [
        ("sglang", "--speculative-algorithm STANDALONE --speculative-draft-model-path d --speculative-num-steps 1 "
         "--speculative-eagle-topk 1 --speculative-use-rejection-sampling", {}, "goes with EAGLE, EAGLE3 and NEXTN"),
        ("sglang", "--speculative-algorithm NEXTN --speculative-num-steps 1 --speculative-eagle-topk 4", {},
         "needs --speculative-num-draft-tokens"),
        ("sglang", "--speculative-algorithm NEXTN --speculative-num-steps 1", {}, "needs --speculative-eagle-topk"),
        ("sglang", "--speculative-use-rejection-sampling", {"head.reduced_vocabulary": True}, "head's is smaller"),
        ("sglang", "--speculative-adaptive --speculative-num-steps 2 --speculative-eagle-topk 1",
         {"adaptive.steps": [0, 3]}, "one of the candidate_steps"),
        ("sglang", "--dp-size 2 --nnodes 2", {}, "do not span nodes"),
        ("sglang", "--speculative-algorithm MTP", {}, "has no --speculative-algorithm MTP: it takes DFLASH, DSPARK"),
        ("sglang", "--speculative-algorithm DFLASH", {}, "DFLASH needs --speculative-draft-model-path"),
        ("vllm", """-sc '{"method": "eagle3", "num_speculative_tokens": 2}'""", {}, 'needs "model"'),
        ("vllm", """-sc '{"method": "mtp", "num_speculative_tokens": 3}'""", {"model.modules": 2}, "a multiple"),
        ("vllm", """-tp 4 -sc '{"method": "mtp", "draft_tensor_parallel_size": 2}'""", {}, "is 1 or --tensor"),
        ("vllm", """--enable-auto-tool-choice""", {}, "needs --tool-call-parser"),
        ("vllm", """--kv-transfer-config '{"kv_connector": "SharedStorageConnector", "kv_role": "kv_both"}'""", {},
         "no kv_connector SharedStorageConnector (it was there in 0.11.0)"),
        ("vllm", """-sc '{"method": "lookahead"}'""", {}, "no method lookahead"),
        ("vllm", """-sc '{"methods": "mtp"}'""", {}, "no 'methods' in speculative_config"),
        ("vllm", "--max-model-len many", {}, "takes a size"),
        ("vllm", "--dtype int4", {}, "takes one of"),
        ("xllm", "--num_speculative_tokens 2", {}, "needs --draft_model"),
        ("xllm", "--nnodes 2 --node_rank 2", {}, "must be below"),
        ("llamacpp", "--spec-type draft-eagle3", {}, "needs --spec-draft-model"),
        ("llamacpp", "--port=80", {}, "as the next word"),
        ("trtllm", "--max_batch_size x", {}, "a whole number")],
)  # fmt: skip
def test_argument_rules_of_engines_are_checked(engine: str, line: str, facts: dict[str, Any], says: str) -> None:
    launcher = launch.launcher_of(engine)
    checked = check_arguments(launcher, parse_version(launcher.newest), shlex.split(line), facts)
    assert any(says in each for each in checked.errors), checked


def test_extra_flags_are_checked_and_rules_on_unknown_facts_are_skipped(tmp_path: Path) -> None:
    words = shlex.split("""-sc '{"method": "mtp", "num_speculative_tokens": 3}'""")
    assert not check_arguments(launch.launcher_of("vllm"), parse_version("0.32.0"), words).errors
    model = _write_config(tmp_path / "m", SMALL["deepseek_v3"])
    options = launch.LaunchOptions(engine="vllm", model=model, gpus="h200x8", extra=("--enable-auto-tool-choice",))
    with pytest.raises(UsageError, match="needs --tool-call-parser"):
        launch.prepare(options)


@pytest.mark.parametrize(("engine", "version", "model", "needs"), [
    ("vllm", "0.8.5", "glm_moe_dsa", "0.16.0"), ("vllm", "0.9.2", "qwen3_5", "0.17.0"),
    ("sglang", "0.5.7", "qwen3_5", "0.5.9"), ("sglang", "0.5.6", "mimo_v2_flash", "0.5.7"),
    ("xllm", "0.8.0", "glm_moe_dsa", "0.9.0"), ("trtllm", "1.2.0", "qwen3_5", "1.3"),
])  # fmt: skip
def test_version_without_the_model_is_refused(
    tmp_path: Path, engine: str, version: str, model: str, needs: str
) -> None:
    model = _write_config(tmp_path / model, SMALL[model])
    options = launch.LaunchOptions(engine=engine, model=model, gpus="h200x8", engine_version=version)
    with pytest.raises(UsageError, match="does not know") as caught:
        launch.prepare(options)
    assert caught.value.hint == f"it takes version {needs} or newer"


def test_version_with_the_model_but_not_its_head_decodes_plainly(tmp_path: Path) -> None:
    model = _write_config(tmp_path / "m", SMALL["mimo_v2_flash"])
    options = launch.LaunchOptions(engine="vllm", model=model, gpus="h200x8", engine_version="0.14.0")
    found = launch.prepare(options)
    assert found.spec.depth == 0 and "version 0.21.0 can" in found.why_depth
    with pytest.raises(UsageError, match=r"version 0\.21\.0 can"):
        launch.prepare(replace(options, depth=1))


def test_model_table_names_known_engines_and_versions() -> None:
    table = read_packaged("headstart.tools.launch", "models.json")
    for row in table["models"]:
        assert {*row["first"], *row.get("heads", {})} <= {*table["sources"]} <= {*ENGINES}
        for version in (*row["first"].values(), *row.get("heads", {}).values()):
            assert version is None or parse_version(version)
