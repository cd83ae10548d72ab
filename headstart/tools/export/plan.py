"""Plan of a directory: complete and checked before the first byte, then written atomically."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.core import Progress
from headstart.errors import CapacityError, ModelError, UsageError
from headstart.files import DISK_FULL, atomic_folder, home_directory
from headstart.formats.base import PIECE_BYTES
from headstart.formats.json_object import read_object
from headstart.formats.safetensors import CONFIG, Planned, write_stream
from headstart.heads.eagle3 import OURS
from headstart.heads.published import MARK
from headstart.models.classify import DrafterKind, classify, mtp_modules

Wrote = Callable[[int], None]  # is called with the bytes of each piece
Writer = Callable[[Path, Wrote], None]  # writes the file at a path
MEGABYTE = 1_000_000
TAKEN_OVER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "tekken.json",
    "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
"""Files that are copied from the source if it has them."""


@dataclass
class Plan:
    """The files of a directory to write; keys are file names."""

    tensors: dict[str, Sequence[Planned]] = field(default_factory=dict)  # safetensors files
    metadata: dict[str, str] | None = None  # of safetensors files
    texts: dict[str, str] = field(default_factory=dict)
    copies: dict[str, Path] = field(default_factory=dict)
    links: dict[str, Path] = field(default_factory=dict)  # hard links to the source, or copies on another file system
    writers: dict[str, Writer] = field(default_factory=dict)  # files of other formats, written last
    other_bytes: int = 0  # size of the files of `writers`
    marks: tuple[str, ...] = ()  # files that only headstart writes; they identify an earlier output
    notes: list[str] = field(default_factory=list)  # for the user
    use: str = ""
    """Command that uses the output. {out}: the path, quoted for a shell; {path}: the path as it is; {depth}: this
    machine's default depth."""
    is_model: bool = False  # a whole model is written, not a head that needs one
    drafter: DrafterKind = field(default_factory=mtp_modules)  # kind of the head that is written
    data: dict[str, Any] = field(default_factory=dict)  # for the JSON report

    def nbytes(self, out: Path) -> int:
        """Returns the bytes to write: all files except links within one file system."""
        planned = sum(each.nbytes for tensors in self.tensors.values() for each in tensors)
        device = _existing(out).stat().st_dev
        links = [path.stat() for path in self.links.values()]
        copied = [path.stat() for path in self.copies.values()] + [each for each in links if each.st_dev != device]
        return planned + self.other_bytes + sum(each.st_size for each in copied)


def as_json(document: Any, *, indent: int = 2, sort: bool = False) -> str:
    text = json.dumps(document, indent=indent, ensure_ascii=False, sort_keys=sort)
    if re.search("[\ud800-\udfff]", text):  # lone surrogates cannot be encoded in UTF-8: escape them
        return json.dumps(document, indent=indent, sort_keys=sort)
    return text


def index_text(files: dict[str, str], total: int | None = None, indent: int = 2) -> str:
    head = {} if total is None else {"metadata": {"total_size": total}}
    return as_json({**head, "weight_map": files}, indent=indent)


def vllm_use(method: str) -> str:
    """Returns vLLM's command that serves a model with the drafter in `{path}`."""
    return (
        "vllm serve MODEL --speculative-config "
        f"""'{{{{"method": "{method}", "model": "{{path}}", "num_speculative_tokens": {{depth}}}}}}'"""
    )


def single_file(tensors: Sequence[Planned], config: dict[str, Any], use: str) -> Plan:
    """Plans a directory of one safetensors file and its config.json."""
    texts = {"config.json": as_json(config) + "\n"}
    drafter = classify(config, {each.name for each in tensors})
    return Plan({"model.safetensors": tensors}, {"format": "pt"}, texts, use=use, drafter=drafter)


def check_sources(out: Path, sources: Iterable[Path | None]) -> None:
    """Raises UsageError for a target that is a source or contains one."""
    target = out.resolve()
    for source in filter(None, sources):
        if target == source.resolve() or target in source.resolve().parents:
            raise UsageError(f"{out} holds the source {source}", "give --out another directory")


def check_target(out: Path, force: bool) -> None:
    """Raises UsageError for a target that exists (without `force`), is not a directory or has the name of a file of
    weights, or must never be replaced, such as the home directory or a repository."""
    target = out.resolve()
    if out.suffix in (".gguf", ".safetensors"):
        raise UsageError(f"--out {out} names a file, but a directory is written", f"leave {out.suffix} out")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is not a directory", "give --out another name")
    if out.exists() and not force:
        raise UsageError(f"{out} exists", "give --out a new name, or --force to replace it")
    for what, folder in (("the working directory", Path.cwd()), ("your home directory", home_directory())):
        if target == folder.resolve() or target in folder.resolve().parents:
            raise UsageError(f"{out} is or holds {what}", "give --out another directory")
    if os.path.ismount(target) or (target / ".git").exists():
        what = "a git repository" if (target / ".git").exists() else "a mounted file system"
        raise UsageError(f"{out} is {what}, which is never replaced", "give --out another directory")


def check_replaced(plan: Plan, out: Path) -> None:
    """Raises UsageError unless the existing directory `out` was written by an export or graft."""
    if not out.exists():
        return
    names = {*plan.texts, *plan.copies, *plan.links, *plan.tensors, *plan.writers, *TAKEN_OVER}
    for mark in plan.marks:
        with suppress(ModelError):  # files that an earlier command has written
            names |= {str(name) for name in read_object(out / mark).get("files") or ()}
    # files and empty folders; other folders are judged by their files
    entries = [path for path in out.rglob("*") if path.is_symlink() or not path.is_dir() or not any(path.iterdir())]
    foreign = [str(path.relative_to(out)) for path in entries if path.is_symlink() or not path.is_file()]
    foreign += {str(path.relative_to(out)) for path in entries} - names
    hint = "give --out another name, or remove the directory yourself"
    if foreign:
        raise UsageError(f"{out} holds {min(foreign)}, which was not written by such a command", hint)
    if entries and not _is_own(plan, out):
        raise UsageError(f"{out} holds something else, which was not written by such a command", hint)


def _is_own(plan: Plan, out: Path) -> bool:
    """Returns whether `out` has a file or config key that only headstart writes, or the planned config.json."""
    if any((out / name).is_file() for name in (*plan.marks, *plan.writers)):
        return True
    try:
        there = (out / CONFIG).read_bytes()
        planned = plan.copies[CONFIG].read_bytes() if CONFIG in plan.copies else plan.texts.get(CONFIG, "").encode()
        return there == planned or bool({MARK, OURS} & read_object(out / CONFIG).keys())
    except (OSError, ModelError):
        return False


def write_plan(plan: Plan, out: Path, progress: Progress) -> int:
    """Writes a plan atomically. Returns the bytes in the directory. Raises UsageError if `out` must not be replaced,
    CapacityError if it cannot be written."""
    check_replaced(plan, out)
    nbytes = plan.nbytes(out)
    check_disk_space(out, nbytes)
    with atomic_folder(out) as aside:
        meter = _Meter(progress, nbytes)
        for name, text in plan.texts.items():
            (aside / name).write_text(text, "utf-8")
        for name, source in plan.copies.items():
            _copy(source, aside / name, meter)
        for name, source in plan.links.items():
            _link(source, aside / name, meter)
        for name, tensors in plan.tensors.items():
            meter.what = name
            write_stream(aside / name, tensors, plan.metadata, meter.wrote)
        for name, writer in plan.writers.items():
            meter.what = name
            writer(aside / name, meter.wrote)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


@dataclass
class _Meter:
    progress: Progress
    total: int
    what: str = ""
    done: int = 0

    def wrote(self, nbytes: int) -> None:
        self.done += nbytes
        self.progress(self.done // MEGABYTE, max(self.total // MEGABYTE, 1), f"{self.what} (MB)")


def _copy(source: Path, target: Path, meter: _Meter) -> None:
    meter.what = source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, target.open("xb") as write:
        while piece := read.read(PIECE_BYTES):
            write.write(piece)
            meter.wrote(len(piece))
    shutil.copystat(source, target)


def _link(source: Path, target: Path, meter: _Meter) -> None:
    """Makes a hard link; copies the file if the file system does not support that."""
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        _copy(source, target, meter)


def _existing(out: Path) -> Path:
    return next(folder for folder in out.absolute().parents if folder.exists())


def check_disk_space(out: Path, nbytes: int) -> None:
    total, _, free = shutil.disk_usage(_existing(out))
    if total and free < nbytes:
        raise CapacityError(f"{out} needs {nbytes / 1e6:,.1f} MB, but {free / 1e6:,.1f} MB are free", "make room")
