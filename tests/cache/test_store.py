"""Block files: stored blocks are read back, corrupt files are never used, the size limit holds, processes share a
folder."""

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
    """Two arrays, the form in which pools give a block."""
    values = np.random.default_rng(number).integers(0, 256, size, np.uint8)
    return [values[:100], values[100:]]


def bytes_of(number: int, size: int = SIZE) -> bytes:
    return b"".join(piece.tobytes() for piece in content_of(number, size))


def read_block(store: BlockStore, number: int, part: str = PART, size: int = SIZE) -> bytes | None:
    found = store.get(part, key_of(number), size)
    return None if found is None else found[0].tobytes()


def store_with_blocks(folder: Path, count: int = 3, most: int = 10**8) -> BlockStore:
    store = BlockStore(folder, most)
    for number in range(count):
        assert store.put(PART, key_of(number), content_of(number), time.time_ns())
    return store


def used_bytes(folder: Path) -> int:
    """Bytes of the files in whole pages; other processes may remove files meanwhile."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            known = path.stat()
            found += -(-known.st_size // 4096) * 4096 if stat.S_ISREG(known.st_mode) else 0
    return found


def test_stored_blocks_are_read_back(tmp_path: Path) -> None:
    store_with_blocks(tmp_path / "new" / "folder")
    store = BlockStore(tmp_path / "new" / "folder", 10**8)  # as in another process
    assert [read_block(store, number) for number in range(4)] == [bytes_of(0), bytes_of(1), bytes_of(2), None]
    assert read_block(store, 0, OTHER) is None and store.counts.loaded.total() == 3 and not store.counts.dropped
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o077 == 0, "other users can read the folder"
    assert read_block(store, 0, size=SIZE - 1) is None, "a block of another size was read"


@pytest.mark.parametrize("how", ["bit", "head", "cut", "longer", "empty", "swapped", "other part", "pipe"])
def test_corrupt_files_are_dropped(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    store = store_with_blocks(tmp_path)
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
        assert read_block(store, 0, part) is None
    assert not path.exists() and store.counts.dropped == 1 and len(caplog.records) == 1
    assert read_block(store, 1) == bytes_of(1)


@pytest.mark.slow
def test_oldest_blocks_are_evicted_first(tmp_path: Path) -> None:
    store, now = BlockStore(tmp_path, 100 * 8192), time.time_ns()
    for number in range(300):
        assert store.put(PART, key_of(number), content_of(number), now + number) and used_bytes(tmp_path) <= 100 * 8192
        if number >= 20:
            assert store.touch(PART, key_of(7), now + number), "a used block was evicted"
    kept = [number for number in range(300) if store.has(PART, key_of(number))]
    assert kept[0] == 7 and kept[1:] == list(range(300 - len(kept) + 1, 300)) and len(kept) > 70
    assert store.counts.evicted == 300 - len(kept)


def test_size_limit_of_few_blocks_holds(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 3 * 8192)
    for number in range(10):
        assert store.put(PART, key_of(number), content_of(number), time.time_ns()) and used_bytes(tmp_path) <= 3 * 8192
    assert read_block(store, 9) == bytes_of(9)
    assert not BlockStore(tmp_path, 8191).put(PART, key_of(99), content_of(99), 0), "the block is larger than the limit"


def test_full_disk_logs_once_and_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed write leaves no file."""
    store = store_with_blocks(tmp_path)

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
    assert store.put(PART, key_of(9), content_of(9), time.time_ns()) and read_block(store, 9) == bytes_of(9)


def test_write_beyond_the_file_size_limit_leaves_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A write beyond RLIMIT_FSIZE fails like a write to a full disk."""
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


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
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


def start_writer(folder: Path, first: int, most: int, count: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", WRITER, str(folder), str(first), str(most), str(count)]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


@pytest.mark.slow
def test_killed_writer_leaves_readable_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files left by a killed writer are whole or found corrupt; stale temporary files are removed."""
    for turn in range(3):
        enough = len(list(tmp_path.rglob("??/*"))) + 3 + turn
        process = start_writer(tmp_path, turn * 10**6, 10**9, 10**6)
        process.stdout.readline()
        until(lambda enough=enough: len(list(tmp_path.rglob("??/*"))) > enough)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    temporary = next(tmp_path.rglob("*/??")) / ".new-0123"
    temporary.write_bytes(b"half of it")
    store, count = BlockStore(tmp_path, 10**9), 0
    for path in tmp_path.rglob("??/*"):
        if not path.name.startswith(".new-"):
            number = int(path.name, 16)
            expected = np.random.default_rng(number).integers(0, 256, 200_000, np.uint8).tobytes()
            assert read_block(store, number, size=200_000) == expected
            count += 1
    assert count > 3
    monkeypatch.setattr(module, "STALE_S", -1.0)
    store.put(PART, key_of(5), content_of(5), time.time_ns())  # a write removes stale files
    assert not list(tmp_path.rglob(".new-*"))


@pytest.mark.slow
def test_processes_share_a_folder_within_its_size_limit(tmp_path: Path) -> None:
    most, over = 100 * 200_704, []
    processes = [start_writer(tmp_path, turn * 10**6, most, 150) for turn in range(3)]
    while any(process.poll() is None for process in processes):
        over += [used_bytes(tmp_path)]
        time.sleep(0.02)
    over += [used_bytes(tmp_path)]
    assert all(process.communicate() and process.returncode == 0 for process in processes)
    assert 0.5 * most < max(over) <= most
    store = BlockStore(tmp_path, most)
    numbers = [int(path.name, 16) for path in tmp_path.rglob("??/*")]
    assert len(numbers) > 50 and all(read_block(store, number, size=200_000) is not None for number in numbers)


def test_received_file_is_checked(tmp_path: Path) -> None:
    data = store_with_blocks(tmp_path / "a").path(PART, key_of(1)).read_bytes()
    other = BlockStore(tmp_path / "b", 10**8)
    assert not other.put_file(PART, key_of(2), data, 1)
    assert not other.put_file(PART, key_of(1), data[:-1], 1) and not other.put_file(PART, key_of(1), b"", 1)
    assert other.put_file(PART, key_of(1), data, 1) and read_block(other, 1) == bytes_of(1)


def test_threads_read_during_writes(tmp_path: Path) -> None:
    store, wrong = store_with_blocks(tmp_path, 20), []

    def read() -> None:
        for number in [*range(20)] * 5:
            if (found := read_block(store, number)) not in (bytes_of(number), None):
                wrong.append(found)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in [*range(20)] * 5:
        store.put(PART, key_of(number), content_of(number), time.time_ns())
    for thread in threads:
        thread.join()
    assert not wrong and not store.counts.dropped
