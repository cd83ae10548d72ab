"""`serve --record`: recorded texts, file permissions, disk errors, size limit, damaged and foreign folders."""

import json
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support
from inside import LlmServer, serve_llm

from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.core import Adapter
from headstart.errors import CapacityError, HeadstartError, UsageError
from headstart.files import write_atomic
from headstart.server.records import (
    MANIFEST,
    RecordedModel,
    RecordFiles,
    TextRecord,
    TextRecorder,
    claim_folder,
    prepare_folder,
    read_records,
)

CONFIG = EngineConfig(**{**support.SMALL, "dtype": "float64"})
RECORD = TextRecord((1, 5, 6), (7, 8, 2), 0.5)
MODEL = RecordedModel("tiny", support.VOCAB, 32, 2, "abc")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(support.headed_model("llama"), CONFIG)


@pytest.fixture
def server(llm: LLM, tmp_path: Path) -> Iterator[LlmServer]:
    with serve_llm(llm, record=tmp_path / "kept") as found:
        yield found


def wait_for_records(folder: Path, count: int) -> list[TextRecord]:
    """Waits until a folder has `count` records, then reads them."""
    support.until(lambda: sum(path.read_bytes().count(b"\n") for path in folder.glob("records-*")) >= count)
    return read_records(folder, support.VOCAB).records


def metric(server: LlmServer, line: str) -> float:
    found = [each for each in server.client.get("/metrics").text.splitlines() if each.startswith(line)]
    return float(found[0].rsplit(" ", 1)[1])


BODY: dict[str, Any] = {"prompt": [3, 4, 5], "max_tokens": 6, "temperature": 0.8, "seed": 1, "return_token_ids": True}


def test_complete_texts_are_recorded_as_ids_in_private_files(server: LlmServer, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    token_ids = server.post("/v1/completions", **BODY).json()["choices"][0]["token_ids"]
    assert server.post("/v1/completions", **BODY | {"seed": 2, "store": False}).status_code == 200
    assert server.post("/v1/completions", **BODY | {"prompt": [9999]}).status_code == 400
    chat = {"messages": [{"role": "user", "content": "the tin"}], "max_tokens": 3, "stream": True, "store": True}
    assert "[DONE]" in server.post("/v1/chat/completions", **chat).text
    server.post("/v1/completions", **BODY | {"n": 2, "prompt": [[3, 4], [4, 3]]})
    records = wait_for_records(folder, 6)
    assert len(records) == 6
    assert records[0] == TextRecord((3, 4, 5), tuple(token_ids), 0.8)
    assert [len(each.prompt_ids) for each in records[2:]] == [2] * 4
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert metric(server, "headstart:records_kept_total") == 6
    text = "".join(path.read_text() for path in folder.glob("records-*"))
    assert set(json.loads(text.splitlines()[0])) == {"prompt_ids", "response_ids", "temperature"}


def test_cancelled_request_is_not_recorded(server: LlmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, has_left = server.served.llm.engine.runner.forward, threading.Event()

    def waiting(spans: Any) -> Any:
        """Stops before token 10 until the client has disconnected."""
        return (spans[0].sequence.num_output < 9 or has_left.wait(support.PATIENCE)) and forward(spans)

    monkeypatch.setattr(server.served.llm.engine.runner, "forward", waiting)
    with server.client.stream("POST", "/v1/completions", json=BODY | {"stream": True, "max_tokens": 100}) as answer:
        next(answer.iter_bytes())
    support.until(lambda: not server.served.admission.num_in_flight)
    has_left.set()
    server.post("/v1/completions", **BODY)
    assert [len(each.response_ids) for each in wait_for_records(tmp_path / "kept", 1)] == [6]


def test_missing_folder_loses_records_but_no_requests(
    server: LlmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kept"
    server.post("/v1/completions", **BODY)
    assert len(wait_for_records(folder, 1)) == 1
    folder.rename(tmp_path / "elsewhere")
    for _ in range(3):
        assert server.post("/v1/completions", **BODY).status_code == 200
    lost = 'headstart:records_lost_total{model_name="' + server.served.metrics.model + '",reason="disk"}'
    support.until(lambda: metric(server, lost) >= 3)
    assert metric(server, lost) == 3
    assert len([each for each in caplog.messages if "cannot record to" in each]) == 1
    assert not folder.exists(), "the folder was created again"
    (tmp_path / "elsewhere").rename(folder)
    server.post("/v1/completions", **BODY)
    assert len(wait_for_records(folder, 2)) == 2


def test_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, line, real = RecordFiles(tmp_path, 10_000), RECORD.line(), os.write
    files.append(line)

    def full(handle: int, data: bytes) -> int:
        if len(data) < len(line):
            raise OSError(28, "No space left on device")
        return real(handle, data[:5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.append(line)
    monkeypatch.undo()
    files.append(line)
    assert read_records(tmp_path, support.VOCAB).records == [RECORD] * 2
    assert b"".join(path.read_bytes() for path in tmp_path.iterdir()) == line * 2


def test_full_queue_drops_and_counts_records(tmp_path: Path) -> None:
    made = TextRecorder(RecordFiles(tmp_path, 10_000), size=2)
    for _ in range(5):
        made.offer(support.request([1, 2, 3]), [4, 5])
    assert made.lost == {"queue": 3, "disk": 0}
    made.start()
    made.stop()
    assert made.kept == 2


def test_records_of_adapters_are_separate(tmp_path: Path) -> None:
    made, request = TextRecorder(RecordFiles(tmp_path, 10_000)), support.request([1, 2, 3])
    for each in (request, replace(request, adapter=Adapter("sql", 0, "digest", "./sql"))):
        made.offer(each, [4, 5] if each.adapter else [6])
    made.start()
    made.stop()
    assert made.kept == 2
    for adapter, tokens in (("", (6,)), ("digest", (4, 5))):
        (record,) = read_records(tmp_path, support.VOCAB, adapter).records
        assert (record.adapter, record.response_ids) == (adapter, tokens)
    with pytest.raises(UsageError, match="holds no text yet of this adapter"):
        read_records(tmp_path, support.VOCAB, "other")
    for path in tmp_path.glob("*.jsonl"):
        path.write_bytes(path.read_bytes().split(b"\n")[1])
    with pytest.raises(UsageError, match="holds no text yet of the model without an adapter"):
        read_records(tmp_path, support.VOCAB)


def test_size_limit_deletes_the_oldest_records(tmp_path: Path) -> None:
    size = len(RECORD.line())
    files = RecordFiles(tmp_path, 32 * size)
    for number in range(200):
        files.append(TextRecord((1, 5, 6), (7, 8, 2), number % 10 / 10).line())
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 32 * size
    records = read_records(tmp_path, support.VOCAB).records
    assert 28 <= len(records) <= 32
    assert records[-1].temperature == 0.9
    other = RecordFiles(tmp_path, 32 * size)  # a second server, or a restart
    for _ in range(40):
        other.append(RECORD.line())
        files.append(RECORD.line())
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 32 * size


def test_invalid_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    bad = [b"{", b"[]", b'{"prompt_ids": [1]}', b'{"prompt_ids": [1], "response_ids": [-1]}', b"\xff\xfe",
           b'{"prompt_ids": [true], "response_ids": [1]}', b'{"prompt_ids": [1], "response_ids": [131]}',
           b'{"prompt_ids": [1], "response_ids": [1], "temperature": "hot"}']  # fmt: skip
    (tmp_path / "records-1.jsonl").write_bytes(b"\n".join([RECORD.line().strip(), *bad]) + b"\n" + RECORD.line()[:-9])
    found = read_records(tmp_path, support.VOCAB)
    assert (found.records, found.damaged) == ([RECORD], len(bad) + 1)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_layers", "fingerprint"])
def test_folder_of_another_model_is_refused_with_the_differing_field(tmp_path: Path, field: str) -> None:
    claim_folder(tmp_path / "a", MODEL)
    claim_folder(tmp_path / "a", RecordedModel(**vars(MODEL) | {"name": "the same elsewhere"}))
    other = RecordedModel(**vars(MODEL) | {field: "x" if field == "fingerprint" else 7})
    with pytest.raises(UsageError, match=f"another model, tiny: its {field} is {getattr(MODEL, field)}, .* is"):
        claim_folder(tmp_path / "a", other)


def folder_with_manifest(folder: Path, text: str) -> None:
    folder.mkdir()
    write_atomic(folder / MANIFEST, text)


def folder_with_other_files(folder: Path) -> None:
    folder.mkdir()
    (folder / "letters.txt").touch()


FOLDERS: dict[str, tuple[Any, str]] = {
    "damaged": (lambda folder: folder_with_manifest(folder, "{"), "is damaged"),
    "list": (lambda folder: folder_with_manifest(folder, "[]"), "is damaged"),
    "version": (lambda folder: folder_with_manifest(folder, '{"headstart_records": 9}'), "version 9"),
    "others": (folder_with_other_files, "holds other files"),
    "file": (lambda folder: folder.touch(), "is a file"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_unusable_folders_are_refused(tmp_path: Path, name: str) -> None:
    make, message = FOLDERS[name]
    make(tmp_path / "a")
    with pytest.raises(HeadstartError, match=message):
        claim_folder(tmp_path / "a", MODEL)


def test_unwritable_folder_is_refused() -> None:
    with pytest.raises(CapacityError, match="cannot write /proc/records"):
        prepare_folder(Path("/proc/records"))
    assert main(["serve", "--record", "/proc/records", "--port", "0"]) == 2


def test_synthetic_acceptance_is_refused(tmp_path: Path) -> None:
    llm = LLM(support.headed_model("llama"), EngineConfig(**{**support.SMALL, "dtype": "float64", "depth": 2,
                                                             "synthetic_acceptance": "0.5,0.5"}))  # fmt: skip
    with pytest.raises(UsageError, match="synthetic-acceptance"), serve_llm(llm, record=tmp_path / "kept"):
        pass
