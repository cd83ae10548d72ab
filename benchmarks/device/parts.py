"""Large files in pieces that a limited transfer takes, and together again."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from headstart import hub
from headstart.files import write_pieces, write_whole

PIECE, PART_BYTES = 1 << 22, 15 << 20


def split(source: Path, folder: Path, name: str, part_bytes: int) -> list[Path]:
    """`folder/name.00`, `.01`, ... of at most so many bytes, and `name.parts.json`, which says what they come to."""
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
    """Put `target` together from parts that lie in any of the folders; False where some are missing yet. Raises
    ValueError for parts that do not come to what was split."""
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
    write_pieces(target, pieces())
    return True


def _found(folders: list[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


TRUNK = "trunk"


def pack(folder: Path, prompts: list[Path], part_bytes: int) -> list[Path]:
    """The default model in parts, and prompt files, in a folder to take along."""
    made = split(hub.resolve(hub.DEFAULT_MODEL), folder, TRUNK, part_bytes)
    for path in prompts:
        made.append(folder / path.name)
        shutil.copyfile(path, made[-1])
    return made


def unpack(carried: Path, store: Path) -> Path | None:
    """Keep what a call brought in `store`, where later calls find it, and put the default model into the cache once
    all its parts are there. The model's path, or None."""
    store.mkdir(parents=True, exist_ok=True)
    for path in sorted(carried.glob("*")) if carried.is_dir() else []:
        if path.is_file():
            write_whole(store / path.name, path.read_bytes())
    if (trunk := hub.cached_trunk()) is None:
        file = Path(hub.BUILTIN[hub.DEFAULT_MODEL].trunk.member).name
        join([store], TRUNK, hub.cache_dir() / "models" / hub.DEFAULT_MODEL / file)
        trunk = hub.cached_trunk()
    return trunk


def archive(folder: Path, out: Path, name: str, part_bytes: int) -> list[Path]:
    """A folder as one archive in parts: `unarchive` is the way back."""
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
    """False where there is no such archive."""
    whole = target.with_name(f".{target.name}.tar")
    if not join([folder], name, whole):
        return False
    with tarfile.open(whole) as tar:
        tar.extractall(target, filter="data")
    whole.unlink()
    return True
