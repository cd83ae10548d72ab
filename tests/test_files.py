"""Atomic writes of files and folders, cleaning after killed writers, reading, locking, home folders."""

import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from headstart import files, system
from headstart.errors import CapacityError, UsageError
from headstart.files import locked_folder, user_path

WRITER = """
import sys, time
from pathlib import Path
from headstart.files import write_atomic_chunks, atomic_folder
out = Path(sys.argv[1])
def pieces():
    yield b"half"
    print("writing", flush=True)
    time.sleep(60)
if out.suffix:
    write_atomic_chunks(out, pieces())
with atomic_folder(out) as aside:
    (aside / "half").write_text("x")
    print("writing", flush=True)
    time.sleep(60)
"""


def kill_while_writing(out: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(out)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout and writer.stdout.readline() == b"writing\n"
        with write_complete(out):  # files of a live writer stay
            assert len([path for path in out.parent.iterdir() if path.name.startswith(".")]) == 1 + (not out.suffix)
        writer.kill()


def write_complete(out: Path) -> AbstractContextManager[Path]:
    if not out.suffix:
        return files.atomic_folder(out)
    files.write_atomic(out, "whole")
    return nullcontext(out)


@pytest.mark.parametrize("name", ["folder", "file.json"])
def test_next_writer_removes_the_files_of_a_killed_one(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    kill_while_writing(out)
    (tmp_path / f".{name}.notes").write_text("mine")
    (tmp_path / f".other.{'0' * 12}").write_text("mine")
    assert len(list(tmp_path.iterdir())) == 4
    with write_complete(out):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {name, f".{name}.notes", f".other.{'0' * 12}"}


@pytest.mark.parametrize("name", ["folder", "file.json", "download"])
def test_another_writer_does_not_remove_files_that_are_not_locked_yet(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, lock = tmp_path / name, system.try_lock

    def lock_after_another_writer(handle: int) -> bool | None:
        monkeypatch.setattr(system, "try_lock", lock)
        files.remove_leftovers(out)
        return lock(handle)

    monkeypatch.setattr(system, "try_lock", lock_after_another_writer)
    with files.temporary_folder(out) if name == "download" else write_complete(out) as made:
        assert made.exists()
    assert [path.name for path in tmp_path.iterdir()] == ([] if name == "download" else [name])


def test_replaced_folder_is_restored_after_a_crash(tmp_path: Path) -> None:
    old = tmp_path / f".out.{'a' * 12}.old"
    old.mkdir()
    (old / "mine").write_text("x")
    with pytest.raises(ZeroDivisionError), files.atomic_folder(tmp_path / "out"):
        raise ZeroDivisionError
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["out", "out/mine"]


def test_atomic_folder_with_keep_preserves_other_files_and_links(tmp_path: Path) -> None:
    out, link = tmp_path / "out", tmp_path / "link"
    (out / ".git").mkdir(parents=True)
    (out / "model.safetensors").write_text("old")
    link.symlink_to(out)
    with files.atomic_folder(link, keep=True) as aside:
        (aside / "model.safetensors").write_text("new")
    assert link.is_symlink() and (out / ".git").is_dir() and (out / "model.safetensors").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "link"}


def test_read_regular_refuses_pipes_devices_and_large_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "big").write_bytes(b"123")
    for name in ("pipe", "zeros", "big", "absent", "."):
        with pytest.raises(OSError):  # the errors differ
            files.read_regular(tmp_path / name, 2)
    assert files.read_regular(tmp_path / "big", 3) == b"123"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no file system that refuses directories")
def test_user_path_expands_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/models/a") == tmp_path / "models/a"
    assert user_path("~no-such-user/a") == Path("~no-such-user/a")


def test_unwritable_folder_is_a_capacity_error() -> None:
    with (
        pytest.raises(CapacityError, match="cannot write /proc/headstart"),
        files.atomic_folder(Path("/proc/headstart/x")),
    ):
        pass


def test_full_disk_error_names_the_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"manifest\.json") as raised:
            files.write_atomic(tmp_path / "manifest.json", b"x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.filename == str(tmp_path / "manifest.json")
    assert not list(tmp_path.iterdir())


def test_locked_folder_is_exclusive(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    with locked_folder(folder):
        with pytest.raises(UsageError, match="another process writes into"), locked_folder(folder):
            pass
        assert folder.exists()
        (folder / "made").touch()
    with locked_folder(folder):
        (folder / "made").unlink()
    assert not folder.exists()


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why?"}', encoding="utf-8-sig")
    assert files.read_text(tmp_path / "prompts.jsonl", "a hint") == '{"prompt": "Why?"}'
