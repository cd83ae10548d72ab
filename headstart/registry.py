"""Finds plug-ins by file name: one file = one model family, drafter, checkpoint format, quantization, launcher, ...

Order: directories added with `search_path`, the package's own folder, then entry points of group `headstart.<kind>`.
A plug-in is a file that defines the constant of its kind (`KINDS`: `FAMILY`, `DRAFTER`, `FORMAT`, ...) at top level;
other files of the folder are helpers. A file whose name begins with an underscore is private to its folder.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from headstart.errors import HeadstartError, ModelError, UsageError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

KindName = Literal[
    "models", "drafters", "backends", "formats", "quantizations", "launchers", "exports", "heads", "tool_formats",
    "reasoning_formats",
]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One kind of plug-in."""

    package: str  # folder of its modules
    constant: str  # that each module defines
    word: str  # in messages
    error: type[HeadstartError]  # for an unknown name


KINDS: dict[KindName, Kind] = {
    "models": Kind("headstart.models", "FAMILY", "model family", ModelError),
    "drafters": Kind("headstart.drafters", "DRAFTER", "drafter", UsageError),
    "formats": Kind("headstart.formats", "FORMAT", "checkpoint format", ModelError),
    "quantizations": Kind("headstart.formats.quantized", "QUANTIZATION", "quantization", ModelError),
    "backends": Kind("headstart.kernels.backends", "BACKEND", "backend", UsageError),
    "launchers": Kind("headstart.tools.launch.launchers", "LAUNCHER", "engine", UsageError),
    "exports": Kind("headstart.tools.export.targets", "EXPORT", "layout", UsageError),
    "heads": Kind("headstart.heads", "HEAD", "kind of head", UsageError),
    "tool_formats": Kind("headstart.text.parsers", "PARSER", "tool format", UsageError),
    "reasoning_formats": Kind("headstart.text.reasoning", "REASONING", "reasoning format", UsageError),
}

_search_paths: dict[str, list[Path]] = {kind: [] for kind in KINDS}  # only `search_path` changes it


@contextmanager
def search_path(kind: KindName, folder: Path) -> Iterator[None]:
    """Look for plug-ins of `kind` in `folder` too, before all others, while the context is open."""
    _search_paths[kind].insert(0, folder)
    try:
        yield
    finally:
        _search_paths[kind].remove(folder)
        if folder not in _search_paths[kind]:
            for path in folder.glob("*.py"):
                sys.modules.pop(_module_name(kind, path), None)


def available(kind: KindName) -> list[str]:
    """Sorted names of all plug-ins of one kind; imports none of them."""
    return sorted({*_names_in(kind, _search_paths[kind]), *_own_names(kind), *_entry_points(kind)})


def _names_in(kind: KindName, folders: list[Path]) -> set[str]:
    return {path.stem for folder in folders for path in folder.glob("*.py") if _defines(kind, path)}


@cache
def _own_names(kind: KindName) -> set[str]:
    """Names of the package's own plug-ins."""
    return _names_in(kind, _package_folders(KINDS[kind].package))


def find(kind: KindName, name: str) -> ModuleType:
    """The module of one plug-in. Raises the kind's user error for an unknown name, listing what exists."""
    key = name.replace("-", "_")
    if not is_available(kind, name):
        raise _unknown(kind, name)
    module = _load(kind, key)
    if not hasattr(module, KINDS[kind].constant):
        where = getattr(module, "__file__", module.__name__)
        raise KINDS[kind].error(
            f"{KINDS[kind].word} {name!r} ({where}) does not define {KINDS[kind].constant}",
            "each plug-in of its kind defines it",
        )
    return module


def is_available(kind: KindName, name: str) -> bool:
    """True if a plug-in of this name exists. Reads fewer files than `available`."""
    key = name.replace("-", "_")
    return _added_file(kind, key) is not None or _is_own(kind, key) or key in _entry_points(kind)


def _added_file(kind: KindName, key: str) -> Path | None:
    """File of a plug-in in the folders of `search_path`; None if there is none."""
    paths = (folder / f"{key}.py" for folder in _search_paths[kind])
    return next((path for path in paths if path.is_file()), None)


@cache
def _is_own(kind: KindName, key: str) -> bool:
    own = [folder / f"{key}.py" for folder in _package_folders(KINDS[kind].package)]
    return any(path.is_file() and _defines(kind, path) for path in own)


def _load(kind: KindName, key: str) -> ModuleType:
    if path := _added_file(kind, key):
        return _load_file(kind, path)
    if _is_own(kind, key):
        return importlib.import_module(f"{KINDS[kind].package}.{key}")
    loaded = _entry_points(kind)[key].load()
    if not isinstance(loaded, ModuleType):
        raise KINDS[kind].error(f"entry point {key!r} of headstart.{kind} is not a module", "point it at a module")
    return loaded


def _load_file(kind: str, path: Path) -> ModuleType:
    """Import a file outside any package once; it stays in sys.modules because dataclasses look themselves up there."""
    full_name = _module_name(kind, path)
    if full_name in sys.modules:
        return sys.modules[full_name]
    spec = importlib.util.spec_from_file_location(full_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[full_name]
        raise
    return module


def _module_name(kind: str, path: Path) -> str:
    folder = "".join(c if c.isalnum() else "_" for c in str(path.parent))
    return f"_headstart_plugin.{kind}.{folder}.{path.stem}"


def _unknown(kind: KindName, name: str) -> HeadstartError:
    known = available(kind)
    listed = f"available: {', '.join(known)}" if known else "none is installed"
    hint = f"{did_you_mean(name.replace('-', '_'), known)} {listed}".lstrip()
    return KINDS[kind].error(f"unknown {KINDS[kind].word} {name!r}", hint)


@cache
def _package_folders(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def _defines(kind: KindName, path: Path) -> bool:
    """True if a file defines its kind's constant. Searches the text, since an import takes longer."""
    found = path.stat()
    return KINDS[kind].constant in _constants(path, found.st_mtime_ns, found.st_size)


@cache  # a changed file has other arguments
def _constants(path: Path, changed_ns: int, num_bytes: int) -> frozenset[str]:
    return frozenset(re.findall(r"^[A-Z_]+\b", path.read_text("utf-8"), re.MULTILINE))


@cache
def _entry_points(kind: str) -> "dict[str, EntryPoint]":
    return {point.name.replace("-", "_"): point for point in _installed().select(group=f"headstart.{kind}")}


@cache  # takes 10 ms
def _installed() -> Any:
    from importlib.metadata import entry_points  # takes 15 ms, and all commands import this file

    return entry_points()
