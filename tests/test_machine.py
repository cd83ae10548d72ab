"""Threads, memory and CPU load from simulated system files: hosts, containers, cgroups v1 and v2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headstart import machine

GIB = 1 << 30


def host(root: Path, files: dict[str, str] | None = None) -> Path:
    """System files of a machine with 64 GiB, 40 of them available, and `files`."""
    meminfo = f"MemTotal:  {64 * GIB // 1024} kB\nMemFree: 1024 kB\nMemAvailable: {40 * GIB // 1024} kB\n"
    cpuinfo = "processor : 0\nmodel name\t: A Processor\nflags : fpu avx2 fma f16c avx512f\n"
    for name, text in {"proc/meminfo": meminfo, "proc/cpuinfo": cpuinfo, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_host_without_limits(tmp_path: Path) -> None:
    root = host(tmp_path, {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert machine.memory(root) == machine.Memory(64 * GIB, 40 * GIB, None)
    assert machine.threads(root).quota is None
    assert machine.threads(root).usable == len(os.sched_getaffinity(0))
    assert machine.cpu(root) == machine.Cpu("A Processor", ("avx2", "fma", "f16c", "avx512f"))


def test_cgroup_v2_limits(tmp_path: Path) -> None:
    """Memory in use counts, except inactive file pages, such as a mapped checkpoint: they can be dropped."""
    group = {
        "memory.max": f"{8 * GIB}\n",
        "memory.current": f"{5 * GIB}\n",
        "memory.stat": f"anon {GIB}\nfile {4 * GIB}\nactive_file {GIB}\ninactive_file {3 * GIB}\n",
        "cpu.max": "150000 100000\n",
    }
    root = host(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in group.items()})
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/\n")
    assert machine.memory(root) == machine.Memory(64 * GIB, 6 * GIB, 8 * GIB)
    threads = machine.threads(root)
    assert (threads.quota, threads.usable) == (1.5, 1)


def test_nested_cgroups_use_the_tightest_limit(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    root = host(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/run.scope\n",
            f"{top}/user.slice/run.scope/memory.max": "max\n",
            f"{top}/user.slice/run.scope/cpu.max": "400000 100000\n",
            f"{top}/user.slice/memory.max": f"{2 * GIB}\n",
            f"{top}/user.slice/memory.current": f"{3 * GIB}\n",
            f"{top}/user.slice/cpu.max": "300000 100000\n",
            f"{top}/memory.max": f"{32 * GIB}\n",
        },
    )
    assert machine.memory(root) == machine.Memory(64 * GIB, 0, 2 * GIB)
    assert machine.threads(root).quota == 3


@pytest.mark.parametrize("own", ["/docker/abc", "/seen/from/outside", "/../elsewhere"])
def test_cgroup_v1_limits(own: str, tmp_path: Path) -> None:
    """The group's files are at the path of /proc/self/cgroup or at the top."""
    inside = "docker/abc/" if own == "/docker/abc" else ""
    top = "sys/fs/cgroup"
    root = host(
        tmp_path,
        {
            "proc/self/cgroup": f"12:memory:{own}\n4:cpu,cpuacct:{own}\n0::/\n",
            f"{top}/memory/memory.limit_in_bytes": "9223372036854771712\n",
            f"{top}/memory/{inside}memory.limit_in_bytes": f"{GIB}\n",
            f"{top}/memory/{inside}memory.usage_in_bytes": f"{GIB // 2}\n",
            f"{top}/memory/{inside}memory.stat": f"cache 0\ntotal_inactive_file {GIB // 4}\n",
            f"{top}/cpu/cpu.cfs_quota_us": "-1\n",
            f"{top}/cpu/{inside}cpu.cfs_quota_us": "50000\n",
            f"{top}/cpu/{inside}cpu.cfs_period_us": "100000\n",
        },
    )
    assert machine.memory(root) == machine.Memory(64 * GIB, GIB * 3 // 4, GIB)
    threads = machine.threads(root)
    assert (threads.quota, threads.usable) == (0.5, 1)


def test_missing_system_files(tmp_path: Path) -> None:
    assert machine.memory(tmp_path).available == machine.UNKNOWN_MEMORY
    assert machine.threads(tmp_path).quota is None


def test_process_limits_bound_the_memory() -> None:
    """The limits of `ulimit -v` and `-d`, less the memory in use, bound the available memory."""
    pytest.importorskip("resource")
    code = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({2 * GIB}, resource.RLIM_INFINITY))"
    code += "; from headstart import machine; found = machine.memory(); print(found.limit, found.available)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    limit, available = map(int, done.stdout.split())
    assert limit == 2 * GIB and 0 < available < 2 * GIB
