"""`launch` of Hub repos, against a local server: headers tell format and heads; engines get repo, file and revision."""

import re
from pathlib import Path

import gguf_files
import numpy as np
import pytest
from gguf import GGUFWriter
from hub_server import REPO, Hub
from support import family_of
from tiny_models import write_model

from headstart.cli.main import main
from headstart.formats.tensor_parts import MTP, part_of
from headstart.hub import published_models

Capture = pytest.CaptureFixture[str]


def launched(capsys: Capture, *words: str, code: int = 0) -> str:
    assert main(["launch", *words, "--gpus", "none", "--dry-run"]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def write_gguf(folder: Path, name: str, **options: int) -> None:
    writer = GGUFWriter(folder / name, "qwen35", **options)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_uint32("qwen35.attention.head_count", 8)
    for tensor in ("token_embd.weight", "blk.1.nextn.eh_proj.weight"):
        writer.add_tensor(tensor, np.zeros((32, 64), np.float32))
    gguf_files.written(writer, folder / name)


@pytest.mark.parametrize("form", ["one file", "parts", "quantizations"])
def test_gguf_repo_is_launched_without_a_download(hub: Hub, capsys: Capture, form: str) -> None:
    write_gguf(hub.folder, "m-Q4_K_M.gguf", **({"split_max_tensors": 1} if form == "parts" else {}))
    if form == "quantizations":
        write_gguf(hub.folder, "m-Q8_0.gguf")
        write_gguf(hub.folder, "mmproj-F16.gguf")
    printed = launched(capsys, "llamacpp", REPO)
    assert f"llama-server --hf-repo {REPO} --host" in printed and "--spec-type draft-mtp" in printed
    first = sorted(path.name for path in hub.folder.iterdir())[0]
    printed = launched(capsys, "llamacpp", f"{REPO}/{first}")
    assert f"llama-server --hf-repo {REPO} --hf-file {first} --host" in printed and "MTP modules: 1" in printed
    assert "GGUF file, which vLLM cannot draft with" in launched(capsys, "vllm", REPO, code=2)


def test_repo_that_lost_its_head_is_launched_without_drafts(hub: Hub, capsys: Capture) -> None:
    config, arrays = family_of("mimo").tiny()
    layers = int(config["num_hidden_layers"])
    write_model(hub.folder, config, {name: each for name, each in arrays.items() if part_of(name, layers) != MTP})
    assert "depth 0: the config declares 1 MTP modules, but their tensors are not" in launched(capsys, "vllm", REPO)
    assert "is not a GGUF file" in launched(capsys, "llamacpp", REPO, code=2)


def test_head_in_a_repo(hub: Hub, tmp_path: Path, capsys: Capture) -> None:
    trunk = write_model(tmp_path / "trunk", *family_of("llama").tiny())
    write_gguf(tmp_path, "m.gguf")
    write_gguf(hub.folder, "head.gguf")
    printed = launched(capsys, "llamacpp", str(tmp_path / "m.gguf"), "--head", REPO)
    assert f"--spec-draft-hf {REPO} --spec-type draft-mtp" in printed
    assert "takes whole repos" in launched(
        capsys, "llamacpp", str(tmp_path / "m.gguf"), "--head", f"{REPO}/head.gguf", code=2
    )
    (hub.folder / "head.gguf").unlink()
    write_model(hub.folder, *family_of("llama").tiny())
    printed = launched(capsys, "vllm", str(trunk), "--head", f"{REPO}@v1")
    assert f'"model": "{REPO}", "revision": "v1"' in printed


def test_revision_and_short_name_of_a_repo(hub: Hub, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(hub.folder, *family_of("mimo").tiny())
    monkeypatch.setitem(published_models(), "mine", {"repo": REPO, "gain": None})
    assert f"vllm serve {REPO} --host" in launched(capsys, "vllm", "mine")
    printed = launched(capsys, "vllm", f"{REPO}@v1")
    assert re.search(f'vllm serve {REPO} .*"revision": "v1".* --revision v1', printed)
    printed = launched(capsys, "sglang", f"{REPO}@v1")
    assert re.search(f"--model-path {REPO} .*--speculative-draft-model-revision v1.* --revision v1", printed)
    for path in hub.folder.iterdir():
        path.unlink()
    write_gguf(hub.folder, "m.gguf")
    assert "llama.cpp has no flag for --revision" in launched(capsys, "llamacpp", f"{REPO}@v1", "--depth", "0", code=2)
