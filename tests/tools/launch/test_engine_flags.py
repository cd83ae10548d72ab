"""The launchers' tables against what engines really take: a committed snapshot, and engines installed here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headstart import registry
from headstart.tools.launch.detect import Installed, find_installed
from headstart.tools.launch.launcher import Flag, Launcher, Program
from headstart.tools.launch.published import Published, published
from headstart.tools.launch.routers import ROUTERS
from headstart.tools.launch.versions import parse

LAUNCHERS: dict[str, Launcher] = {
    name: registry.find("launchers", name).LAUNCHER for name in registry.available("launchers")
}
PROGRAMS: dict[str, Program] = {**LAUNCHERS, **ROUTERS}
ENTRIES = [(name, flag) for name, program in PROGRAMS.items() for flag in program.flags]
READER = Path(__file__).resolve().parents[3] / "benchmarks" / "engine_arguments.py"


def snapshot(name: str) -> Published:
    found = published(name)
    assert found is not None, f"nothing was read of {name}: benchmarks/engine_arguments.py"
    return found


@pytest.mark.parametrize(("name", "flag"), ENTRIES, ids=lambda item: getattr(item, "name", item))
def test_flag_is_in_the_versions_that_the_table_says(name: str, flag: Flag) -> None:
    known = snapshot(name)
    for version in known.versions:
        words = [flag.name, *(f"{flag.name}={value}" for value in flag.values if _lists_values(known, flag.name))]
        for word in words if flag.serves(parse(version)) else []:
            assert version in known.arguments.get(word, ()), f"{name} {version} has no {word}"


@pytest.mark.parametrize(("name", "flag"), ENTRIES, ids=lambda item: getattr(item, "name", item))
def test_flag_is_not_in_versions_outside_its_range(name: str, flag: Flag) -> None:
    known, launcher = snapshot(name), PROGRAMS[name]
    same = [each for each in launcher.flags if each.name == flag.name]
    words = [f"{flag.name}={value}" for value in flag.values] if flag.values else [flag.name]
    for version in known.versions:
        served = [each for each in same if each.serves(parse(version))]
        for word in words:
            if not any(not flag.values or word.partition("=")[2] in each.values for each in served):
                assert version not in known.arguments.get(word, ()), f"{name} {version} has {word} after all"


@pytest.mark.parametrize(("name", "flag"), ENTRIES, ids=lambda item: getattr(item, "name", item))
def test_source_file_is_one_that_has_the_flag(name: str, flag: Flag) -> None:
    known = snapshot(name)
    word = f"{flag.name}={flag.values[0]}" if flag.values and _lists_values(known, flag.name) else flag.name
    assert flag.source in known.files[flag.name] | known.files[word]


def _lists_values(known: Published, name: str) -> bool:
    return any(word.startswith(f"{name}=") for word in known.arguments)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_stale_flags_are_gone_and_their_successors_exist(name: str) -> None:
    known, launcher = snapshot(name), LAUNCHERS[name]
    newest = list(known.versions)[-1]
    stale = {*launcher.removed, *launcher.renamed} - STILL_ALIASES
    assert not {flag for flag in stale if newest in known.arguments.get(flag, ())}
    successors = {flag.partition(".")[0] for flag in launcher.renamed.values()}
    assert all(newest in known.arguments.get(flag, ()) for flag in successors)


STILL_ALIASES = {"--draft-p-min", "--model-draft"}
"""llama.cpp still takes these; the current spelling is clearer."""


@pytest.mark.parametrize("name", LAUNCHERS)
def test_settings_stand_for_flags_of_the_table(name: str) -> None:
    launcher = LAUNCHERS[name]
    assert set(launcher.settings.values()) <= {flag.name for flag in launcher.flags}


@pytest.mark.parametrize("name", PROGRAMS)
def test_newest_version_was_read(name: str) -> None:
    assert PROGRAMS[name].newest in snapshot(name).versions


@pytest.mark.parametrize("name", LAUNCHERS)
def test_table_fits_the_engine_installed_here(name: str) -> None:
    launcher = LAUNCHERS[name]
    installed = find_installed(launcher, None)
    if installed is None:
        pytest.skip(f"{launcher.title} is not installed")
    version = installed.version or parse(launcher.newest)
    taken = _taken(name, installed)
    flags = {flag.name for flag in launcher.flags if flag.serves(version) and flag.name.startswith("--")}
    assert not flags - taken


def _taken(name: str, installed: Installed) -> set[str]:
    """The flags of an installed engine: from its Python files, else from its own help."""
    if installed.python is not None:
        (root,) = installed.python.parent.parent.glob("lib/python3*/site-packages")
        return {word for word, _ in _readers()[name](root)}
    shown = subprocess.run([installed.program, "--help"], capture_output=True, text=True, timeout=60)
    return set(re.findall(r"--[\w-]+", shown.stdout + shown.stderr))


def _readers() -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("engine_arguments", READER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.READERS)
