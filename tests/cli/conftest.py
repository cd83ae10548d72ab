import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type:
    """Replaces headstart.api.LLM by a fake that records its requests."""
    from fake import FakeLLM

    monkeypatch.setattr("headstart.api.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "asked", [])
    monkeypatch.setattr(FakeLLM, "configs", [])
    monkeypatch.setattr(FakeLLM, "images", [])
    return FakeLLM
