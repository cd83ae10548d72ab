"""`headstart inspect` of Hub repos, against a local server that answers byte ranges and counts the bytes sent."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
from hub_server import REPO, Handler, Hub, point_at
from huggingface_hub import close_session
from support import family_of
from tiny_models import write_model
from zoo import ZOO, Tensors, config_of, heads, trunk, write

from headstart.cli.main import main
from headstart.errors import HeadstartError, ModelError, UsageError
from headstart.formats import remote
from headstart.models.classify import classify_path
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions

ENTRY = ZOO["qwen3_5"]


def complete_tensors() -> Tensors:
    return trunk(ENTRY) | heads(ENTRY) | {"model.big.weight": ("BF16", (4096, 4096))}


def inspect_data(name: str = REPO) -> dict[str, Any]:
    return inspect.run(InspectOptions(model=name)).data


def test_repo_is_inspected_by_headers_only(hub: Hub) -> None:
    write(hub.folder, config_of(ENTRY), complete_tensors(), shards=3)
    (hub.folder / "generation_config.json").write_text('{"temperature": 0.6}')
    data, local = inspect_data(), inspect.run(InspectOptions(model=str(hub.folder))).data
    assert data["parts"] == local["parts"] and data["heads"]["modules"] == local["heads"]["modules"]
    assert (data["model"], data["heads"]["verdict"], data["sampling"]) == (REPO, "alive", {"temperature": 0.6})
    assert hub.weight_bytes <= 3 * remote.FIRST < data["total"]["bytes"] / 50


def test_header_longer_than_the_first_request_is_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST", 64)
    write(hub.folder, config_of(ENTRY), complete_tensors())
    assert inspect_data()["heads"]["verdict"] == "alive" and hub.weight_bytes < 10_000
    hub.ranges = False  # without ranges, the second request skips the bytes already read
    assert inspect_data()["heads"]["verdict"] == "alive"


def test_stripped_repo_is_reported(hub: Hub) -> None:
    write(hub.folder, config_of(ENTRY), trunk(ENTRY))
    assert inspect_data()["heads"]["verdict"] == "stripped" and main(["inspect", REPO]) == 1


@pytest.mark.parametrize("step", [64, 128 * 1024])
def test_gguf_repo_is_inspected(hub: Hub, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.setattr(remote, "FIRST", step)
    writer = gguf.GGUFWriter(hub.folder / "m.gguf", "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(256)
    writer.add_head_count(4)
    writer.add_token_list([f"token{i}" for i in range(500)])
    writer.add_tensor("token_embd.weight", np.zeros((4096, 256), np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(32, np.float32))
    gguf_files.written(writer, hub.folder / "m.gguf")
    for name in (REPO, f"{REPO}/m.gguf"):
        data = inspect_data(name)
        assert (data["format"], data["heads"]["verdict"]) == ("gguf", "none")
        assert data["total"]["bytes"] == 4096 * 256 * 4 + 128
    assert hub.weight_bytes < 600_000


def test_trunk_of_a_repo_is_compared_with_its_config(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST", 16 * 1024)  # only headers
    config, arrays = family_of("qwen3").tiny()
    name = "model.layers.1.self_attn.o_proj.weight"
    for changed, why in (
        (arrays, ""), ({**arrays, name: arrays[name][:-1]}, "has shape"), ({**arrays, "x": arrays[name]}, "no place"),
        ({each: array for each, array in arrays.items() if each != name}, "has no tensor"),
    ):  # fmt: skip
        write_model(hub.folder, config, changed)
        shutil.rmtree(hub.folder.parent / "cache", ignore_errors=True)
        here = inspect_data()["here"]
        assert here["runs"] == (not why) and why in here["why"] and ("layers.1" in here["why"] or why != "has shape")
    assert hub.weight_bytes < 5 * 16 * 1024


def test_gguf_file_within_the_first_request_is_inspected(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST", 1 << 24)
    config, arrays = family_of("llama").tiny()
    factors = np.ones(config["head_dim"] // 2, np.float32)
    path, more = hub.folder / "m.gguf", lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    gguf_files.write_gguf(path, config, arrays, more=more)
    assert inspect_data()["here"] == inspect.run(InspectOptions(model=str(hub.folder / "m.gguf"))).data["here"]


def test_exported_module_is_classified_by_its_tensors(hub: Hub) -> None:
    """The config.json of an exported module looks like that of a model with MTP modules."""
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    write(hub.folder, config, {"fc.weight": ("BF16", (8, 16)), "layers.0.mlp.up_proj.weight": ("BF16", (8, 8))})
    assert classify_path(REPO).method == classify_path(hub.folder).method == "eagle"


def test_split_gguf_is_inspected(hub: Hub) -> None:
    complete_tensors = gguf.GGUFWriter(hub.folder / "m.gguf", "llama", split_max_tensors=1)
    complete_tensors.add_block_count(1)
    complete_tensors.add_embedding_length(32)
    complete_tensors.add_head_count(4)
    for name in ("token_embd.weight", "output_norm.weight", "blk.0.ffn_up.weight"):
        complete_tensors.add_tensor(name, np.zeros((8, 32), np.float32))
    gguf_files.written(complete_tensors, hub.folder / "m.gguf")
    data = inspect_data()
    assert (data["files"], data["total"]["parameters"]) == (3, 3 * 8 * 32)
    (hub.folder / "m-00002-of-00003.gguf").unlink()
    assert "no such file" in refused(f"{REPO}/m-00001-of-00003.gguf")


def test_truncated_response_is_refused(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST", 30)
    header = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little") + bytes(200)
    (hub.folder / "m.gguf").write_bytes(header)
    monkeypatch.setattr(Handler, "file", lambda self, name: self.answer(206, header[:30], {"Content-Range": "x/9999"}))
    refused(REPO, ModelError)


def refused(name: str, kind: type[HeadstartError] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        inspect_data(name)
    assert caught.value.hint
    return caught.value.message


def test_bad_repos_are_refused(hub: Hub) -> None:
    assert "no model 'org/unknown'" in refused("org/unknown") and "neither safetensors nor GGUF" in refused(REPO)
    write(hub.folder, config_of(ENTRY), trunk(ENTRY), shards=2)
    (hub.folder / "model-1.safetensors").unlink()
    assert "model-1.safetensors, which is missing" in refused(REPO, ModelError)
    (hub.folder / "model-1.safetensors").write_bytes((2 * 10**9).to_bytes(8, "little") + b"{}")
    assert "too short for its header of 2000000000 bytes" in refused(REPO, ModelError)
    hub.private = True
    assert "gated" in refused(REPO)


def test_config_that_is_not_json_is_refused(hub: Hub) -> None:
    write(hub.folder, {}, trunk(ENTRY))
    (hub.folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refused(REPO, ModelError)


def test_unreachable_hub_without_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(monkeypatch, "http://127.0.0.1:9", tmp_path)
    assert REPO in refused(REPO)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(REPO)


def test_cache_is_used_without_network(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import snapshot_download

    write(hub.folder, config_of(ENTRY), trunk(ENTRY) | heads(ENTRY))
    snapshot_download(REPO, dry_run=False)
    hub.sent.clear()
    assert inspect_data()["heads"]["verdict"] == "alive" and hub.weight_bytes == 0  # the file is in the cache
    point_at(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    close_session()
    assert inspect_data()["heads"]["verdict"] == "alive"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert inspect_data()["heads"]["verdict"] == "alive"


@pytest.mark.parametrize("files", [["*.json", "*.safetensors"], ["config.json"], ["*.gguf"]])
def test_part_of_a_repo_in_the_cache_is_used_without_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, files: list[str]
) -> None:
    from huggingface_hub import snapshot_download

    if files == ["*.gguf"]:
        gguf_files.write_gguf(hub.folder / "m.gguf", *family_of("llama").tiny())
    else:
        write_model(hub.folder, *family_of("mimo").tiny())
    (hub.folder / "README.md").write_text("not in the cache")
    snapshot_download(REPO, allow_patterns=files, dry_run=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    verdicts = {"*.json": "alive", "config.json": "unchecked", "*.gguf": "none"}
    assert inspect_data()["heads"]["verdict"] == verdicts[files[0]]


@pytest.mark.slow
def test_hf_environment_is_used_and_torch_is_not_imported(hub: Hub, tmp_path: Path) -> None:
    write(hub.folder, config_of(ENTRY), complete_tensors(), shards=2)
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    code = "import sys; from headstart.cli.main import main; main(['inspect', 'org/model', '--json']); "
    code += "assert not {'torch', 'headstart.engine', 'transformers'} & set(sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout)["heads"]["verdict"] == "alive"
    assert (tmp_path / "home" / "hub" / "models--org--model").is_dir()
