"""`headstart doctor`: the machine, the backend, packages and cached models. Imports no torch."""

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, NamedTuple

from headstart import machine
from headstart.config import EngineConfig
from headstart.core import Report
from headstart.errors import UsageError
from headstart.kernels.backend import select_backend
from headstart.kernels.native.placement import choose_placement
from headstart.tools.inspect.cached import cached
from headstart.version import __version__

COMPILERS = ("c++", "g++", "clang++")


def run() -> Report:
    """Describes this machine and installation; `ok` is false when no backend can run."""
    cpu, threads, memory, nodes = machine.cpu(), machine.threads(), machine.memory(), machine.nodes()
    data: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "backend": backend(),
        "cpu": {"model": cpu.model, "instruction_sets": list(cpu.instruction_sets)},
        "threads": {"cores": threads.cores, "affinity": threads.affinity, "cgroup_quota": threads.quota,
                    "usable": threads.usable},
        "nodes": {"cpus": [len(node.cpus) for node in nodes],
                  "placement": choose_placement(threads.usable, None, nodes, threads.quota).why},
        "memory": {"total": memory.total, "available": memory.available, "cgroup_limit": memory.limit},
        "compiler": next(iter(program_output(COMPILERS, "--version").splitlines()), None),
        "gpu": gpus(),
        "packages": package_versions(),
        "cache": [{"name": each.name, "bytes": each.size} for each in cached()],
    }  # fmt: skip
    return Report(ok=data["backend"]["name"] is not None, data=data, lines=_lines(data))


def backend() -> dict[str, str | None]:
    try:
        name, kind, why = select_backend(EngineConfig())
    except UsageError as error:
        return {"name": None, "why": str(error)}
    return {"name": name, "why": "; ".join(filter(None, (why, kind.detail())))}


class InstalledGPU(NamedTuple):
    """An NVIDIA GPU, as its driver reports it. Memory is text with a unit, such as 81559 MiB."""

    name: str
    free: str
    total: str
    driver: str

    def __str__(self) -> str:
        return f"{self.name}, {self.free} free of {self.total}, driver {self.driver}"


def installed_gpus() -> list[InstalledGPU]:
    query = "--query-gpu=name,memory.free,memory.total,driver_version"
    rows = program_output(("nvidia-smi",), query, "--format=csv,noheader").splitlines()
    return [InstalledGPU(*row.rsplit(", ", 3)) for row in rows]


def gpus() -> list[str]:
    return [str(each) for each in installed_gpus()]


def package_versions() -> dict[str, str | None]:
    """Returns the installed version of each declared dependency, including extras; None: not installed."""
    try:
        declared = requires("headstart") or []
    except PackageNotFoundError:  # run from a source tree that is not installed
        declared = ["numpy", "safetensors", "tokenizers", "gguf", "torch"]
    names = sorted({match.group().lower() for line in declared if (match := re.match(r"[\w.-]+", line))})
    return {name: installed_version(name) for name in names}


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def program_output(names: Sequence[str], *arguments: str) -> str:
    """Returns stripped stdout of the first program that exists; empty if none runs."""
    program = next((path for name in names if (path := shutil.which(name))), None)
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _lines(data: dict[str, Any]) -> list[str]:
    usage, limits = data["memory"], data["threads"]
    limit = f", limited to {gib(usage['cgroup_limit'])}" if usage["cgroup_limit"] else ""
    quota = f", quota {limits['cgroup_quota']:g}" if limits["cgroup_quota"] else ""
    missing = [name for name, version in data["packages"].items() if version is None]
    rows = {
        "headstart": f"{data['version']}, Python {data['python']} ({sys.executable})",
        "system": data["system"],
        "backend": f"{data['backend']['name'] or 'NONE'}: {data['backend']['why']}",
        "cpu": f"{data['cpu']['model']} ({', '.join(data['cpu']['instruction_sets']) or 'no known instruction set'})",
        "threads": f"{limits['usable']} usable (cores {limits['cores']}, affinity {limits['affinity']}{quota})",
        "nodes": f"{' + '.join(map(str, data['nodes']['cpus']))} cores: {data['nodes']['placement']}",
        "memory": f"{gib(usage['available'])} available of {gib(usage['total'])}{limit}",
        "compiler": data["compiler"] or "none found (the native backend is compiled at installation)",
        "gpu": "; ".join(data["gpu"]) or "none found",
        "models": f"{len(data['cache'])} in the cache" if data["cache"] else "none in the cache: headstart pull",
    }
    lines = [f"{name:10} {value}" for name, value in rows.items()]
    lines += [f"{'':10} {item['name']} ({item['bytes'] / 1e6:.0f} MB)" for item in data["cache"]]
    present = ", ".join(f"{name} {version}" for name, version in data["packages"].items() if version)
    lines.append(f"{'packages':10} {present}")
    return lines + ([f"{'':10} not installed: {', '.join(missing)}"] if missing else [])


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
