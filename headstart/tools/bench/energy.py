"""Joules, where the machine tells: processor packages by the powercap counters of Linux, NVIDIA GPUs by nvidia-smi.
They are the machine's, not the program's: nothing else should run."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

POWERCAP = Path("/sys/class/powercap")
GPU_MS = 100
"""Time between two readings of a GPU's power."""


class EnergyMeter:
    """`with meter: ...`, then `joules`; None where nothing can be read."""

    def __init__(self, powercap: Path = POWERCAP, gpu_program: str = "nvidia-smi") -> None:
        self._zones = [zone for zone in sorted(powercap.glob("intel-rapl:[0-9]*")) if _is_package(zone)]
        self._gpu = shutil.which(gpu_program)
        self.joules: float | None = None

    def __enter__(self) -> Self:
        self.joules = None
        self._before = [_counter(zone / "energy_uj") for zone in self._zones]
        self._power = _GpuPower(self._gpu) if self._gpu else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gpu = self._power.stop() if self._power else None
        packages = [_spent(zone, before) for zone, before in zip(self._zones, self._before, strict=True)]
        known = [each for each in (*packages, gpu) if each is not None]
        self.joules = sum(known) if known else None


def _is_package(zone: Path) -> bool:
    """Zones with two numbers are parts of packages. Many systems let only root read."""
    return zone.name.count(":") == 1 and _counter(zone / "energy_uj") is not None


def _counter(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _spent(zone: Path, before: int | None) -> float | None:
    after = _counter(zone / "energy_uj")
    if after is None or before is None:
        return None
    if after < before:  # the counter has begun anew
        after += _counter(zone / "max_energy_range_uj") or 0
    return (after - before) / 1e6


class _GpuPower:
    """Power of all GPUs, read every GPU_MS and summed over time."""

    def __init__(self, program: str) -> None:
        query = ["--query-gpu=index,power.draw", "--format=csv,noheader,nounits", f"--loop-ms={GPU_MS}"]
        self._process = subprocess.Popen(
            [program, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._readings: dict[str, list[float]] = {}
        self._started = time.perf_counter()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            index, _, watts = line.partition(",")
            try:
                self._readings.setdefault(index, []).append(float(watts))
            except ValueError:  # "[N/A]": this GPU does not tell
                continue

    def stop(self) -> float | None:
        """Joules since the start; None when no GPU has told its power."""
        seconds = time.perf_counter() - self._started
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        means = [sum(watts) / len(watts) for watts in self._readings.values() if watts]
        return seconds * sum(means) if means else None
