"""What numbers depend on."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import headstart


def provenance(threads: int) -> dict[str, Any]:
    """Command, time, machine and versions of this run."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return {
        "command": shlex.join(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": cpu.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "headstart": headstart.__version__,
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
    }
