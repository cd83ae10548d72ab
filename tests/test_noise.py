"""Noise check of measurements: time that threads wait for a processor."""

import threading
import time
from pathlib import Path

import pytest

from headstart import noise


def test_waiting_time_of_threads_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread counts from zero. `waiting` is a share of the time of all threads."""
    monkeypatch.setattr(noise, "TASKS", tmp_path)

    def write(task: str, waited_s: float) -> None:
        (tmp_path / task).mkdir(exist_ok=True)
        (tmp_path / task / "schedstat").write_text(f"1 {int(waited_s * 1e9)} 3")

    write("1", 100.0)
    now = iter((1000.0, 1000.1))
    monkeypatch.setattr(noise.time, "perf_counter", lambda: next(now))
    with noise.check_noise(2) as found:
        write("1", 100.02)
        write("2", 0.02)
    assert found.waiting == pytest.approx(0.2) and found.is_disturbed


@pytest.mark.parametrize("text", [None, "", "1", "a b c"])
def test_missing_or_unreadable_schedstat_is_no_disturbance(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "TASKS", tmp_path / "tasks")
    if text is not None:
        (tmp_path / "tasks" / "1").mkdir(parents=True)
        (tmp_path / "tasks" / "1" / "schedstat").write_text(text)
    with noise.check_noise(1) as found:
        pass
    assert not found.is_disturbed


@pytest.mark.skipif(not noise.TASKS.exists(), reason="no /proc")
def test_short_lived_threads_cause_no_error() -> None:
    with noise.check_noise(1) as found:
        for _ in range(20):
            threading.Thread(target=time.sleep, args=(0.001,)).start()
    assert found.waiting is None or found.waiting >= 0
