"""Splits large files for limited transfers and joins them again."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from headstart import hub
from headstart.files import write_atomic, write_atomic_chunks

PIECE, PART_BYTES = 1 << 22, 15 << 20
CALL_BYTES = 63 << 20
"""Default upload limit of a call, including this repository's files."""
ROOT = Path(__file__).parents[2]


def split(source: Path, folder: Path, name: str, part_bytes: int) -> list[Path]:
    """Writes `folder/name.00`, `.01`, ... of at most `part_bytes`, and `name.parts.json` with the size and hash."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{name}.*"):
        old.unlink()
    made, digest = [], hashlib.sha256()
    with source.open("rb") as file:
        while block := file.read(part_bytes):
            digest.update(block)
            made.append(folder / f"{name}.{len(made):02}")
            made[-1].write_bytes(block)
    facts = {"parts": [path.name for path in made], "bytes": source.stat().st_size, "sha256": digest.hexdigest()}
    index = folder / f"{name}.parts.json"
    index.write_text(json.dumps(facts) + "\n", "utf-8")
    return [index, *made]


def join(folders: list[Path], name: str, target: Path) -> bool:
    """Joins parts from any of the folders to `target`; False if some are missing. Raises ValueError if the result is
    not the split file."""
    index = _found(folders, f"{name}.parts.json")
    if index is None:
        return False
    facts = json.loads(index.read_text("utf-8"))
    parts = [_found(folders, each) for each in facts["parts"]]
    if any(part is None for part in parts):
        return False
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes]:
        for part in parts:
            assert part
            with part.open("rb") as file:
                while block := file.read(PIECE):
                    digest.update(block)
                    yield block
        if digest.hexdigest() != facts["sha256"]:
            raise ValueError(f"the parts of {name} do not come to the file that was split: pack again")

    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic_chunks(target, pieces())
    return True


def _found(folders: list[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


TRUNK, PACKAGES = "trunk", "packages.zip"
TAKEN = ("gguf",)
"""Pure-Python packages that machines with torch often lack."""


def pack(folder: Path, prompts: list[Path], call_bytes: int) -> list[list[Path]]:
    """Puts the default model in parts, packages and prompt files into folders 1, 2, ..., one per call."""
    for old in folder.glob("[0-9]*"):
        shutil.rmtree(old)
    folder.mkdir(parents=True, exist_ok=True)
    packages = folder / PACKAGES
    with zipfile.ZipFile(packages, "w", zipfile.ZIP_DEFLATED) as file:
        for name in TAKEN:
            found = find_spec(name)
            assert found and found.origin
            whole = Path(found.origin).parent
            for path in sorted(whole.rglob("*.py")):
                file.write(path, path.relative_to(whole.parent))
    small = [packages, *(Path(shutil.copyfile(path, folder / path.name)) for path in prompts)]
    beside = sum(path.stat().st_size for path in small) + (1 << 16)
    part_bytes = max(call_bytes - beside, call_bytes // 2)
    return by_call([*small, *split(hub.resolve(hub.DEFAULT_MODEL), folder, TRUNK, part_bytes)], folder, call_bytes)


def by_call(paths: list[Path], folder: Path, call_bytes: int) -> list[list[Path]]:
    """Moves the files in order into folders 1, 2, ... of at most `call_bytes` each."""
    calls: list[list[Path]] = []
    left = 0
    for path in paths:
        if not calls or path.stat().st_size > left:
            calls.append([])
            left = call_bytes
        left -= path.stat().st_size
        (folder / str(len(calls))).mkdir(exist_ok=True)
        calls[-1].append(path.rename(folder / str(len(calls)) / path.name))
    return calls


def repository_bytes() -> int:
    """Bytes of this repository's files, which every call uploads."""
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout  # fmt: skip
    return sum((ROOT / name).stat().st_size for name in listed.split("\0") if name and (ROOT / name).is_file())


def unpack(carried: Path, store: Path) -> Path | None:
    """Stores the uploaded files, in numbered folders or not, in `store` for later calls. Puts the default model into
    the cache once all its parts have arrived. Returns the model's path, or None."""
    store.mkdir(parents=True, exist_ok=True)
    for path in sorted([*carried.glob("*"), *carried.glob("[0-9]*/*")]):
        if path.is_file():
            write_atomic(store / path.name, path.read_bytes())
    if (trunk := hub.cached_trunk()) is None:
        file = Path(hub.BUILTIN[hub.DEFAULT_MODEL].trunk.member).name
        join([store], TRUNK, hub.cache_dir() / "models" / hub.DEFAULT_MODEL / file)
        trunk = hub.cached_trunk()
    return trunk


def use_packages(store: Path) -> None:
    """Makes uploaded packages importable here and in child processes, after installed ones."""
    packages = store / PACKAGES
    if packages.is_file() and not all(map(find_spec, TAKEN)):
        sys.path.append(str(packages))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(packages))))


def archive(folder: Path, out: Path, name: str, part_bytes: int) -> list[Path]:
    """Writes a folder as an archive in parts, for `unarchive`."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(folder, arcname=".")
    whole = out / f".{name}.tar"
    out.mkdir(parents=True, exist_ok=True)
    whole.write_bytes(content.getbuffer())
    try:
        return split(whole, out, name, part_bytes)
    finally:
        whole.unlink()


def unarchive(folder: Path, name: str, target: Path) -> bool:
    """Unpacks an archive of `archive`. False if there is none."""
    whole = target.with_name(f".{target.name}.tar")
    if not join([folder], name, whole):
        return False
    with tarfile.open(whole) as tar:
        tar.extractall(target, filter="data")
    whole.unlink()
    return True
