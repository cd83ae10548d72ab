"""Contents of model folders: placeholder files, stale indexes, heads in separate files."""

import json
from pathlib import Path

import numpy as np
import pytest
from lora_files import random_adapter
from support import family_of, model_at
from tiny_models import write_model

from headstart.errors import ModelError
from headstart.formats import is_checkpoint, open_checkpoint, safetensors
from headstart.formats.adapter import is_adapter
from headstart.formats.tensor_parts import MTP, part_of
from headstart.placeholder import PARTIAL
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 988097824\n"
PLACEHOLDERS = {
    "a Git LFS pointer": (LFS, "is a Git LFS pointer of 134 bytes", "git lfs pull"),
    "a pointer of Xet": (b"# xet version 0\nfilesize = 988097824\n", "is a pointer of Xet storage", "headstart pull"),
    "nothing": (b"", "is empty", "headstart pull"),
    "a web page": (b"\n<!DOCTYPE html>\n<html>", "is a web page", "/resolve/"),
    "an old web page": (b"<HTML><body>", "is a web page", "/resolve/"),
    "an answer of the Hub": (b"Entry not found", "server's answer instead of the file: Entry not found", "pull"),
    "a refusal of the Hub": (b"Access to model x is restricted.\nLog in", "Access to model x is restricted.", "pull"),
}
FILES = ("model.safetensors", "config.json", "model.safetensors.index.json", "model.gguf")


def llama(path: Path) -> Path:
    config, arrays = family_of("llama").tiny()
    return write_model(path, config, arrays)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", PLACEHOLDERS)
def test_placeholder_files_are_identified(kind: str, file: str, tmp_path: Path) -> None:
    content, message, hint = PLACEHOLDERS[kind]
    folder = llama(tmp_path / "m")
    (folder / file).write_bytes(content)
    with pytest.raises(ModelError) as refused:
        open_checkpoint(folder / file if file.endswith(".gguf") else folder)
    assert f"{folder / file} " in refused.value.message and message in refused.value.message
    assert hint in refused.value.hint


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_placeholder_tokenizer_files_are_identified(file: str, tmp_path: Path) -> None:
    folder = llama(tmp_path / "m")
    (folder / file).write_bytes(LFS)
    with pytest.raises(ModelError, match=f"{file} is a Git LFS pointer"):
        open_checkpoint(folder).load_tokenizer()


@pytest.mark.parametrize("ending", PARTIAL)
def test_incomplete_downloads_are_named(ending: str, tmp_path: Path) -> None:
    folder = llama(tmp_path / "m")
    whole, partial = folder / "model.safetensors", folder / f"model-00001-of-00001.safetensors{ending}"
    whole.rename(partial)
    with pytest.raises(ModelError, match=f"{partial.name}.* an incomplete download"):
        open_checkpoint(folder)
    names = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(names))
    with pytest.raises(ModelError, match=f"which is missing: {partial.name} is an incomplete download"):
        open_checkpoint(folder)


def test_whole_file_is_read_despite_a_stale_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Same as transformers; an index that names the file is used."""
    folder = llama(tmp_path / "m")
    names = sorted(open_checkpoint(folder).tensors)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}))
    assert sorted(open_checkpoint(folder).tensors) == names and "does not name model.safetensors" in caplog.text
    caplog.clear()
    index.write_text(json.dumps({"weight_map": {names[0]: "model.safetensors"}}))
    assert sorted(open_checkpoint(folder).tensors) == names[:1] and not caplog.records


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_head_in_a_separate_file_is_read(family: str, indexed: bool, tmp_path: Path) -> None:
    config, arrays = family_of(family).tiny()
    layers = config["num_hidden_layers"]
    head = {name: array for name, array in arrays.items() if part_of(name, layers) == MTP}
    trunk = {name: array for name, array in arrays.items() if name not in head}
    folder = write_model(tmp_path / "m", config, trunk)
    safetensors.save(folder / "mtp.safetensors", head)
    safetensors.save(folder / "adapter_model.safetensors", {"lora.weight": np.ones(2, np.float32)})
    if indexed:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        index = {"weight_map": dict.fromkeys(trunk, "model-1.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors.keys() == arrays.keys()
    assert {file.name for file in checkpoint.files} == {
        "mtp.safetensors",
        "model-1.safetensors" if indexed else "model.safetensors",
    }
    assert checkpoint.stray.keys() == {*head, "lora.weight"}


def test_stray_head_file_is_ignored(tmp_path: Path) -> None:
    """The file of an old head, such as the source of a graft, is not mixed with the head in the shards."""
    config, arrays = family_of("qwen3_5").tiny()
    folder = write_model(tmp_path / "m", config, arrays)
    safetensors.save(folder / "old.safetensors", {"mtp.fc.weight": np.ones((2, 2), np.float32)})
    tensors = open_checkpoint(folder).tensors
    assert tensors.keys() == arrays.keys() and {each.file.name for each in tensors.values()} == {"model.safetensors"}


def test_adapter_with_a_copied_config_is_not_a_model(tmp_path: Path) -> None:
    folder = llama(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    assert not is_checkpoint(folder) and is_adapter(folder)
    with pytest.raises(ModelError, match="is a LoRA adapter, not a whole model"):
        open_checkpoint(folder)


def test_adapter_beside_whole_weights_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = llama(tmp_path / "m")
    before = open_checkpoint(folder).tensors.keys()
    adapter = random_adapter(folder, 1)
    for file in adapter.iterdir():
        file.rename(folder / file.name)
    assert open_checkpoint(folder).tensors.keys() == before and not is_adapter(folder)
    finding = f"a LoRA adapter lies beside the weights of {folder}, and is not used"
    assert finding in str(inspect.run(InspectOptions(model=str(folder))).data["findings"])
    shorter = write_model(tmp_path / "shorter", *family_of("llama").tiny(num_hidden_layers=1))
    for target, fits in ((llama(tmp_path / "same"), True), (shorter, False)):
        fit = inspect.run(InspectOptions(model=str(folder), target=str(target))).data["fit"]
        assert fit["fits"] == fits and [check["what"] for check in fit["checks"]] == ["LoRA adapter beside the weights"]
    model_at(folder)
    assert finding in caplog.text
    caplog.clear()
    model_at(folder, lora=(f"a={folder}",))
    assert not caplog.records
