"""A short run of benchmarks/storm.py: mixed requests, no wrong text, no leak."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from process import Server
from support import PATIENCE

pytestmark = pytest.mark.slow  # a server process
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TEXTS = ["Name a colour.", "Tell me a long story about a fox.", "Write a poem.", "What is 7 + 5?", "x " * 300]


def test_storm_of_mixed_requests(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import storm

    questions = tmp_path / "question.jsonl"
    questions.write_text("\n".join(json.dumps({"category": text, "turns": [text]}) for text in TEXTS))
    host, _, port = server.url.removeprefix("http://").partition(":")
    where = {"host": host, "port": int(port), "pid": server.process.pid, "questions": questions, "per_category": 1}
    found = storm.storm(Namespace(**where, minutes=PATIENCE / 60, requests=3, clients=12, replays=10))
    assert found["different"] == []
    assert not any(found["left_behind"].values())
    assert found["replayed"] == 10
    statuses = found["statuses"]
    assert statuses.keys() <= {
        "asked 200", "asked 400", "left -1", "left 200", "left 400", "bad 400", "bad 404", "bad 413",
    }, statuses  # fmt: skip
    assert statuses["asked 200"] > 15
    assert "Traceback" not in server.log.read_text("utf-8")
