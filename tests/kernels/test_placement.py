"""Placement of threads and weights on simulated machines with several NUMA nodes."""

from pathlib import Path

import numpy as np
import pytest

from headstart import machine
from headstart.errors import UsageError
from headstart.kernels.native.placement import FREE, choose_placement
from headstart.machine import Node


def write_sysfs(root: Path, nodes: list[str], caches: list[str]) -> Path:
    """Writes /sys of a machine: the CPUs of each node and of each last-level cache."""
    files = {f"node/node{n}/cpulist": cpus for n, cpus in enumerate(nodes)} | {"node/possible": f"0-{len(nodes) - 1}"}
    for cpus in caches:
        first, _, last = cpus.partition("-")
        for cpu in range(int(first), int(last or first) + 1):
            cache = f"cpu/cpu{cpu}/cache"
            files |= {f"{cache}/index0/level": "1", f"{cache}/index0/shared_cpu_list": str(cpu)}
            files |= {f"{cache}/index3/level": "3", f"{cache}/index3/shared_cpu_list": cpus}
    for name, text in files.items():
        path = root / "sys/devices/system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


TWO_SOCKETS = (["0-31", "32-63", ""], [f"{8 * n}-{8 * n + 7}" for n in range(8)])


def test_two_sockets_form_one_group_per_cache(tmp_path: Path) -> None:
    """Nodes are numbered from 0; a node without CPUs (memory only) is skipped."""
    nodes = machine.nodes(write_sysfs(tmp_path, *TWO_SOCKETS), range(64))
    assert [node.number for node in nodes] == [0, 1]
    placed = choose_placement(64, None, nodes, None)
    assert placed.groups == tuple((8, n // 4, tuple(range(8 * n, 8 * n + 8))) for n in range(8))
    assert placed.weights == "share" and choose_placement(64, "replicate", nodes, None).weights == "replicate"
    assert choose_placement(64, "off", nodes, None).groups == ()


def test_threads_are_spread_over_allowed_cpus(tmp_path: Path) -> None:
    """Threads are spread in proportion to the allowed CPUs of each node; with a CPU quota the system places them."""
    nodes = machine.nodes(write_sysfs(tmp_path, *TWO_SOCKETS), [*range(12), *range(60, 64)])
    assert [node.cpus for node in nodes] == [tuple(range(12)), tuple(range(60, 64))]
    assert [group[:2] for group in choose_placement(8, None, nodes, None).groups] == [(4, 0), (2, 0), (2, 1)]
    assert [group[:2] for group in choose_placement(2, None, nodes, None).groups] == [(1, 0), (1, 1)]
    assert choose_placement(8, None, nodes, 8.0).groups == ()
    assert choose_placement(8, "interleave", nodes, 8.0).weights == "interleave"
    assert choose_placement(1, None, nodes, None).groups == ()
    with pytest.raises(UsageError, match="--numa replicate needs a thread on each of 2 nodes"):
        choose_placement(1, "replicate", nodes, None)


@pytest.mark.parametrize(("cpus", "sizes"), [(2, []), (15, []), (16, [8, 8]), (20, [6, 7, 7])])
def test_one_node_with_one_cache_binds_no_threads(cpus: int, sizes: list[int], tmp_path: Path) -> None:
    """Weights are not moved; many threads are split into groups."""
    for root in (tmp_path, write_sysfs(tmp_path / "told", [f"0-{cpus - 1}"], [f"0-{cpus - 1}"])):
        nodes = machine.nodes(root, range(cpus))
        assert nodes == (Node(0, (tuple(range(cpus)),)),)
        placed = choose_placement(cpus, "replicate", nodes, None)
        assert (placed == FREE) == (not sizes) and [group[0] for group in placed.groups] == sizes
        assert placed.weights is None and not any(group[2] for group in placed.groups)


GROUPS = ((2, 0, (0,)), (1, 0, ()), (2, 1, (0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["share", "interleave", "replicate"])
def test_placed_weights_keep_their_values(how: str) -> None:
    """Every byte is copied on each node, also for matrices smaller than a pair of blocks or a page."""
    native, extension = (pytest.importorskip(f"headstart.kernels.native.{name}") for name in ("packing", "_native"))
    pool, rng = native.ThreadPool(5, GROUPS), np.random.default_rng(7)
    for rows, cols in ((1, 3), (40, 70), (2000, 1100)):
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        data = native.aligned_empty(native.matrix_bytes(0, rows, cols, 32, 0, 0))
        native.pack_rows(pool, "F32", values.view(np.uint8), cols, data)
        placed = extension.place(pool, native.Matrix(0, rows, cols, 32, 0, 0, 0, data), how)
        np.testing.assert_array_equal(placed.data, data)
        np.testing.assert_array_equal(native.dequantize(placed, pool), values)


def test_invalid_groups_are_refused() -> None:
    native = pytest.importorskip("headstart.kernels.native.packing")
    for groups in ([(1, 0, ())], [(2, 1, ())], [(0, 0, ()), (2, 0, ())], [(1, 0, ()), (1, 2, ())]):
        with pytest.raises(ValueError, match=r"group|node"):
            native.ThreadPool(2, groups)
