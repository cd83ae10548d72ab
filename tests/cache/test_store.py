"""Files of blocks: what is put is got, what is broken is never used, the bound holds, processes share a directory."""

import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import until

from headstart.cache import store as module
from headstart.cache.store import HEADER_BYTES, BlockStore
from headstart.errors import UsageError

PART, OTHER = "ab" * 16, "cd" * 16
SIZE = 5000


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content_of(number: int, size: int = SIZE) -> list[np.ndarray]:
    """In two pieces, as pools give it."""
    values = np.random.default_rng(number).integers(0, 256, size, np.uint8)
    return [values[:100], values[100:]]


def whole(number: int, size: int = SIZE) -> bytes:
    return b"".join(piece.tobytes() for piece in content_of(number, size))


def got(store: BlockStore, number: int, part: str = PART, size: int = SIZE) -> bytes | None:
    found = store.get(part, key_of(number), size)
    return None if found is None else found[0].tobytes()


def filled(folder: Path, count: int = 3, most: int = 10**8) -> BlockStore:
    store = BlockStore(folder, most)
    for number in range(count):
        assert store.put(PART, key_of(number), content_of(number), time.time_ns())
    return store


def used(folder: Path) -> int:
    """Bytes of its files, in pages; others may remove some meanwhile."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            known = path.stat()
            found += -(-known.st_size // 4096) * 4096 if stat.S_ISREG(known.st_mode) else 0
    return found


def test_what_is_put_is_got(tmp_path: Path) -> None:
    filled(tmp_path / "new" / "folder")
    store = BlockStore(tmp_path / "new" / "folder", 10**8)  # as the next process has it
    assert [got(store, number) for number in range(4)] == [whole(0), whole(1), whole(2), None]
    assert got(store, 0, OTHER) is None and store.counts.loaded.total() == 3 and not store.counts.dropped
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o077 == 0, "prompts are nobody else's"
    assert got(store, 0, size=SIZE - 1) is None, "another size is not taken"


@pytest.mark.parametrize("how", ["bit", "head", "cut", "longer", "empty", "swapped", "other part", "pipe"])
def test_what_is_broken_is_dropped(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    store = filled(tmp_path)
    path, other = store.path(PART, key_of(0)), store.path(PART, key_of(1))
    data, part = path.read_bytes(), PART
    if how == "other part":
        part, path = OTHER, store.path(OTHER, key_of(0))
        path.parent.mkdir(parents=True)
    if how == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        place = {"bit": HEADER_BYTES + 3210, "head": 40}.get(how, -1)
        flipped = data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
        broken = {"cut": data[:-1], "longer": data + b"x", "empty": b"", "swapped": other.read_bytes()}
        path.write_bytes(flipped if place > 0 else broken.get(how, data))
    with caplog.at_level(logging.WARNING, "headstart.cache"):
        assert got(store, 0, part) is None
    assert not path.exists() and store.counts.dropped == 1 and len(caplog.records) == 1
    assert got(store, 1) == whole(1)


@pytest.mark.slow
def test_the_oldest_go_first(tmp_path: Path) -> None:
    store, now = BlockStore(tmp_path, 100 * 8192), time.time_ns()
    for number in range(300):
        assert store.put(PART, key_of(number), content_of(number), now + number) and used(tmp_path) <= 100 * 8192
        if number >= 20:
            assert store.touch(PART, key_of(7), now + number), "what is used stays"
    kept = [number for number in range(300) if store.has(PART, key_of(number))]
    assert kept[0] == 7 and kept[1:] == list(range(300 - len(kept) + 1, 300)) and len(kept) > 70
    assert store.counts.evicted == 300 - len(kept)


def test_a_bound_of_few_blocks(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 3 * 8192)
    for number in range(10):
        assert store.put(PART, key_of(number), content_of(number), time.time_ns()) and used(tmp_path) <= 3 * 8192
    assert got(store, 9) == whole(9)
    assert not BlockStore(tmp_path, 8191).put(PART, key_of(99), content_of(99), 0), "more than there is room for"


def test_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, nothing left behind, and another try later."""
    store = filled(tmp_path)

    def full(file: Any, piece: Any) -> None:
        file.write(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "headstart.cache"):
        patched.setattr(module, "_write_all", full)
        assert not any(store.put(PART, key_of(number), content_of(number), 1) for number in range(3, 8))
        patched.setattr(module, "RETRY_S", 0.0)
        store._paused_until = 0.0
        assert not store.put(PART, key_of(9), content_of(9), time.time_ns())
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3
    store._paused_until = 0.0
    assert store.put(PART, key_of(9), content_of(9), time.time_ns()) and got(store, 9) == whole(9)


def test_a_small_file_system(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A limit of the process on files, which any write meets as it meets a full disk."""
    code = f"""
import resource, signal, time
from headstart.cache.store import BlockStore
import numpy as np
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
store = BlockStore(__import__('pathlib').Path({str(tmp_path)!r}), 10**8)
print(store.put({PART!r}, bytes(16), [np.zeros(9000, np.uint8)], time.time_ns()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n" and "File too large" in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"--kv-spill: cannot write .*file"):
        BlockStore(tmp_path / "file", 10**8)


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from headstart.cache.store import BlockStore
store, first = BlockStore(Path(sys.argv[1]), int(sys.argv[3])), int(sys.argv[2])
print("ready", flush=True)
for number in range(first, first + int(sys.argv[4])):
    values = np.random.default_rng(number).integers(0, 256, 200_000, np.uint8)
    store.put("ab" * 16, number.to_bytes(16, "big"), [values], time.time_ns())
"""


def writer(folder: Path, first: int, most: int, count: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", WRITER, str(folder), str(first), str(most), str(count)]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


@pytest.mark.slow
def test_killed_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies there afterwards is whole, or found to be broken; what was left aside goes."""
    for turn in range(3):
        enough = len(list(tmp_path.rglob("??/*"))) + 3 + turn
        process = writer(tmp_path, turn * 10**6, 10**9, 10**6)
        process.stdout.readline()
        until(lambda enough=enough: len(list(tmp_path.rglob("??/*"))) > enough)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    aside = next(tmp_path.rglob("*/??")) / ".new-0123"
    aside.write_bytes(b"half of it")
    store, count = BlockStore(tmp_path, 10**9), 0
    for path in tmp_path.rglob("??/*"):
        if not path.name.startswith(".new-"):
            number = int(path.name, 16)
            expected = np.random.default_rng(number).integers(0, 256, 200_000, np.uint8).tobytes()
            assert got(store, number, size=200_000) == expected
            count += 1
    assert count > 3
    monkeypatch.setattr(module, "STALE_S", -1.0)
    store.put(PART, key_of(5), content_of(5), time.time_ns())  # looks around
    assert not list(tmp_path.rglob(".new-*"))


@pytest.mark.slow
def test_processes_share_a_directory_within_its_bound(tmp_path: Path) -> None:
    most, over = 100 * 200_704, []
    processes = [writer(tmp_path, turn * 10**6, most, 150) for turn in range(3)]
    while any(process.poll() is None for process in processes):
        over += [used(tmp_path)]
        time.sleep(0.02)
    over += [used(tmp_path)]
    assert all(process.communicate() and process.returncode == 0 for process in processes)
    assert 0.5 * most < max(over) <= most
    store = BlockStore(tmp_path, most)
    numbers = [int(path.name, 16) for path in tmp_path.rglob("??/*")]
    assert len(numbers) > 50 and all(got(store, number, size=200_000) is not None for number in numbers)


def test_a_file_from_elsewhere_is_checked(tmp_path: Path) -> None:
    data = filled(tmp_path / "a").path(PART, key_of(1)).read_bytes()
    other = BlockStore(tmp_path / "b", 10**8)
    assert not other.put_file(PART, key_of(2), data, 1)
    assert not other.put_file(PART, key_of(1), data[:-1], 1) and not other.put_file(PART, key_of(1), b"", 1)
    assert other.put_file(PART, key_of(1), data, 1) and got(other, 1) == whole(1)


def test_threads_read_while_others_write(tmp_path: Path) -> None:
    store, wrong = filled(tmp_path, 20), []

    def read() -> None:
        for number in [*range(20)] * 5:
            if (found := got(store, number)) not in (whole(number), None):
                wrong.append(found)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in [*range(20)] * 5:
        store.put(PART, key_of(number), content_of(number), time.time_ns())
    for thread in threads:
        thread.join()
    assert not wrong and not store.counts.dropped
