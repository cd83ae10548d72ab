"""`headstart doctor` parses the output of nvidia-smi."""

import os
from pathlib import Path

import pytest

from headstart.tools import doctor
from headstart.tools.launch.parallelism import NodeDevices, here


def test_gpus_and_their_memory_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$1" | grep -q "name,memory.free,memory.total,driver_version" || exit 1\n'
                       'echo "NVIDIA H100, 80GB, 80000 MiB, 81559 MiB, 570.10"\n')  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert doctor.gpus() == ["NVIDIA H100, 80GB, 80000 MiB free of 81559 MiB, driver 570.10"]
    assert here() == NodeDevices(1, 81559 * 2**20, "NVIDIA H100, 80GB", "cuda")


def test_no_driver_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.gpus() == []
