"""The demo with a fake LLM: the comparison and the exit code."""

import json
from typing import Any

import pytest

import headstart.tools.demo  # noqa: F401  # imported before LLM is replaced, or its name would keep the fake
from headstart.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def fake_demo(fake_llm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("headstart.tools.demo.LLM", fake_llm)
    return fake_llm


def test_identical_texts_exit_0(fake_demo: Any, capsys: Capture) -> None:
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "identical 8/8" in shown
    assert "passes    32 -> 16 for 32 tokens (0.50 per token, 50% saved)" in shown
    _, _, *asked = fake_demo.asked  # the first two are the warm-up
    assert [depth for *_, depth in asked[:6]] == [0, None, None, 0, 0, None], "off and on take turns in going first"


def test_different_texts_exit_1(fake_demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(fake_demo, "differs", True)
    assert main(["demo", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["identical"], document["total"], document["model"]) == (0, 8, "smollm2-135m-mtp")
    assert {row["first_difference"] for row in document["prompts"]} == {3}


def test_disabled_drafting_is_refused(capsys: Capture) -> None:
    assert main(["demo", "--no-mtp"]) == 2
    assert "switched off" in capsys.readouterr().err


def test_narrow_terminal_shows_every_number(fake_demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["demo"]) == 0
    wide = capsys.readouterr().out
    assert "│ code " in wide, "COLUMNS limits the output to a pipe"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "passes: 4 → 2" in lines
