"""Process start to first token, and peak memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from engines.process import EngineFailed, Starter

SAMPLE_SECONDS = 0.05


def first_token_s(starter: Starter) -> float:
    """Wall seconds from process start to the first token, with the prompt "Hi"."""
    started = time.perf_counter()
    group, wait = starter.launch("Hi", 1)
    try:
        wait()
        return time.perf_counter() - started
    finally:
        group.end()


def peak_memory(starter: Starter, prompt: str, max_tokens: int) -> dict[str, float]:
    """Peak MiB of private (clean and dirty), anonymous and resident pages during start and one answer."""
    group, wait = starter.launch(prompt, max_tokens)
    peaks: dict[str, float] = {}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            for key, value in _memory(group.process.pid).items():
                peaks[key] = max(peaks.get(key, 0.0), value)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        wait()
        if starter.ends and group.process.stdout is not None:
            group.process.stdout.read()
    finally:
        done.set()
        sampler.join()
        group.end()
    if not peaks:
        raise EngineFailed(f"{starter.name}: no memory could be read")
    return peaks


def _memory(pid: int) -> dict[str, float]:
    folder = Path("/proc") / str(pid)
    try:
        rollup = _numbers((folder / "smaps_rollup").read_text())
        status = _numbers((folder / "status").read_text())
    except OSError:  # the process has ended
        return {}
    private = rollup.get("Private_Clean", 0) + rollup.get("Private_Dirty", 0)
    return {
        "private_mib": private / 1024,
        "anonymous_mib": status.get("RssAnon", 0) / 1024,
        "resident_mib": rollup.get("Rss", 0) / 1024,
    }


def _numbers(text: str) -> dict[str, int]:
    """Numbers of `Name:   123 kB` lines."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0])
    return found
