"""`headstart doctor`: what this machine and this installation offer. Imports no torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from headstart import __version__, hub
from headstart.config import EngineConfig
from headstart.core import Report
from headstart.engine.load import choose_backend
from headstart.errors import UsageError

INSTRUCTION_SETS = (
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "asimd", "sve",
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")


def run() -> Report:
    """Collect everything; `ok` is false when no backend can run."""
    packages = package_versions()
    data: dict[str, Any] = {
        "version": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "backend": backend(),
        "cpu": cpu(Path("/proc/cpuinfo")),
        "threads": threads(Path("/sys/fs/cgroup")),
        "memory": memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup")),
        "compiler": first_line([COMPILERS, "--version"]),
        "gpu": gpus(),
        "packages": packages,
        "cache": cached_models(),
    }
    return Report(ok=data["backend"]["name"] is not None, data=data, lines=_lines(data))


def backend() -> dict[str, str | None]:
    """Which backend `auto` means here and why; the native one with its instruction-set path."""
    try:
        name, why = choose_backend(EngineConfig())
    except UsageError as error:
        return {"name": None, "why": str(error)}
    if name == "native":
        from headstart.kernels.native import instruction_paths  # compiled: absent where there was no compiler

        why = f"{why}; path {instruction_paths()[0]} of {', '.join(instruction_paths())}"
    return {"name": name, "why": why}


def cpu(cpuinfo: Path) -> dict[str, Any]:
    """Model name and the instruction sets that matter to kernels."""
    text = read(cpuinfo)
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    return {
        "model": model.group(1) if model else platform.processor() or "unknown",
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in present],
    }


def threads(cgroup: Path) -> dict[str, Any]:
    """Cores in the machine, those this process may use, and the cgroup's quota in cores (None: no quota)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(cgroup)
    usable = affinity if quota is None else max(1, min(affinity, int(quota)))
    return {"cores": os.cpu_count(), "affinity": affinity, "cgroup_quota": quota, "usable": usable}


def cpu_quota(cgroup: Path) -> float | None:
    """Cores that cgroup v2 (cpu.max) or v1 (cfs quota) grants."""
    limit, _, period = read(cgroup / "cpu.max").partition(" ")
    if not limit:
        limit, period = read(cgroup / "cpu/cpu.cfs_quota_us"), read(cgroup / "cpu/cpu.cfs_period_us")
    try:
        cores = int(limit) / int(period)
    except ValueError:  # "max", or no such file
        return None
    return cores if cores > 0 else None


def memory(meminfo: Path, cgroup: Path) -> dict[str, int | None]:
    """Bytes in the machine, available now, and the cgroup's limit (None: no limit)."""
    kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", read(meminfo), re.MULTILINE))
    limit = read(cgroup / "memory.max") or read(cgroup / "memory/memory.limit_in_bytes")
    total = int(kilobytes.get("MemTotal", 0)) * 1024
    capped = int(limit) if limit.isdigit() and int(limit) < total else None
    return {"total": total, "available": int(kilobytes.get("MemAvailable", 0)) * 1024, "cgroup_limit": capped}


def gpus() -> list[str]:
    """Names and memory of NVIDIA GPUs, as their driver tells."""
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return output([("nvidia-smi",), *query]).splitlines()


def package_versions() -> dict[str, str | None]:
    """Installed versions of all declared dependencies, extras included; None: not installed."""
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


def read(path: Path) -> str:
    """Stripped text of a file of the system; empty if it is not there."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def output(command: list[Any]) -> str:
    """Stripped stdout of the first program of `command[0]` that exists; empty if none runs."""
    program = next((path for name in command[0] if (path := shutil.which(name))), None)
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def first_line(command: list[Any]) -> str | None:
    return next(iter(output(command).splitlines()), None)


def cached_models() -> list[dict[str, Any]]:
    """Built-in models in our own cache, then models in the Hugging Face cache, with their size in bytes."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    trunks = {name: path for name in hub.BUILTIN if (path := hub.cached_trunk(name))}
    own = [{"name": name, "bytes": path.stat().st_size} for name, path in trunks.items()]
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return own
    models = sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
    return own + [{"name": repo.repo_id, "bytes": repo.size_on_disk} for repo in models]


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
