"""`verify --transcript` and `--against`: equal tokens, or the first difference."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("headstart.kernels.native.backend", exc_type=ImportError)

from lora_files import random_adapter
from tiny_models import write_tiny

from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.errors import UsageError
from headstart.formats.adapter import digest_of
from headstart.kernels.backend import select_backend
from headstart.tools.verify.options import VerifyOptions
from headstart.tools.verify.run import run

PROMPTS = ("the thing", "an inner ring", "x")
COMMON = ("--threads", "1", "--kv-blocks", "40", "--portable-bits")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    path = folder.parent / "there.json"
    config = EngineConfig(backend="native", threads=1, kv_blocks=40, portable_bits=True)
    options = VerifyOptions(
        model=str(folder), config=config, prompts=PROMPTS, raw=True, max_tokens=9, temperatures=(0.0, 1.0),
        seeds=(0, 4), transcript=path,
    )  # fmt: skip
    report = run(options)
    assert report.ok and report.data["texts"] == 12
    assert report.data["arithmetic"].endswith("portable bits")
    return path


def test_transcript_of_the_same_machine_is_identical(
    folder: Path, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = json.loads(written.read_text())["texts"]
    assert [(each["temperature"], each["seed"]) for each in texts[:4]] == [(0, 0), (0, 1), (0, 2), (0, 4000012)]
    assert {len(each["token_ids"]) for each in texts} >= {9}
    assert main(["verify", str(folder), *COMMON, "--depth-by-batch", "[[1,64,2]]", "--against", str(written)]) == 0
    assert "identical 12/12 texts" in capsys.readouterr().out


def test_transcript_alternates_between_adapters(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, path = random_adapter(folder, 3), tmp_path / "adapted.json"
    lora = ("--lora", f"sql={adapter}")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    words = ["--prompts", str(tmp_path / "prompts.txt"), "--raw", "--max-tokens", "9", "--temperatures", "0"]
    assert main(["verify", str(folder), *COMMON, *lora, *words, "--transcript", str(path)]) == 0
    texts = json.loads(path.read_text())["texts"]
    assert [each.get("adapter", "") for each in texts] == ["", digest_of(adapter), ""]
    capsys.readouterr()
    assert main(["verify", str(folder), *COMMON, *lora, "--against", str(path)]) == 0
    assert "identical 3/3 texts" in capsys.readouterr().out
    message = refusal(["verify", folder, *COMMON, "--against", path], capsys)
    assert f"texts of an adapter with digest {digest_of(adapter)}, which is not loaded" in message


def test_first_difference_of_each_text_is_reported(
    folder: Path, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(written.read_text())
    ids = document["texts"][5]["token_ids"]
    ids[3] += 1
    document["texts"][7]["token_ids"] = document["texts"][7]["token_ids"][:-1]
    (tmp_path / "other.json").write_text(json.dumps(document))
    assert main(["verify", str(folder), *COMMON, "--against", str(tmp_path / "other.json"), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["identical"], data["texts"]) == (False, 10, 12)
    assert data["found"][0] == {"text": 5, "position": 3, "theirs": ids[3], "ours": ids[3] - 1}
    assert data["found"][1]["theirs"] == -1
    assert main(["verify", str(folder), *COMMON, "--against", str(tmp_path / "other.json")]) == 1
    assert f"text 5 (T 0, seed 4000014), output token 3: {ids[3]} there, {ids[3] - 1} here" in capsys.readouterr().out


def refusal(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(each) for each in arguments]) == 2
    return capsys.readouterr().err


def test_unusable_transcripts_and_options_are_refused(
    folder: Path, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny("llama", tmp_path / "model", num_hidden_layers=1)
    assert "but this is" in refusal(["verify", other, *COMMON, "--against", written], capsys)
    assert "int8" in refusal(["verify", folder, *COMMON, "--quantization", "int8", "--against", written], capsys)
    (tmp_path / "bad.json").write_text('{"texts": []}')
    for file, why in ((tmp_path / "bad.json", "is no transcript at"), (tmp_path / "none", "No such file")):
        assert why in refusal(["verify", folder, "--against", file], capsys)
    assert "--depths has no meaning" in refusal(["verify", folder, "--transcript", "x", "--depths", "1"], capsys)
    assert "both given" in refusal(["verify", folder, "--transcript", "x", "--against", written], capsys)
    where = tmp_path / "bad.json" / "x.json"
    assert f"{where} cannot be written" in refusal(["verify", "no-model", "--transcript", where], capsys)


def test_portable_bits_need_the_native_backend() -> None:
    with pytest.raises(UsageError, match="--portable-bits needs the native backend"):
        select_backend(EngineConfig(backend="reference", portable_bits=True))
