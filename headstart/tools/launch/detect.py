"""Which engine is installed, and in what version: by its files, since asking the program can take half a minute."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from headstart.errors import UsageError
from headstart.tools.launch.launcher import Program
from headstart.tools.launch.versions import Version, parse


@dataclass(frozen=True)
class Installed:
    """A program, and the Python beside it if it is a Python program. `version` None: it does not say."""

    program: Path
    python: Path | None
    distribution: str | None
    version: Version | None


def find_installed(launcher: Program, program: str | None) -> Installed | None:
    """`program`: the engine's program, or a folder that holds it; None looks in PATH. Raises UsageError for one that is
    not there."""
    place = program or launcher.program
    if program and Path(program).expanduser().is_dir():
        place = str(Path(program).expanduser() / launcher.program)
        if not Path(place).exists() and (Path(place).with_name("python")).exists():
            place = str(Path(place).with_name("python"))
    program_path = shutil.which(str(Path(place).expanduser()) if "/" in place else place)
    if program_path is None:
        if program:
            raise UsageError(f"--program: {program} is no program", f"give the path of {launcher.program}")
        return None
    return describe(launcher, Path(program_path))


def describe(launcher: Program, program: Path) -> Installed:
    """The version by the distribution installed beside the program, else by what it says of itself."""
    python = program.with_name("python")
    for distribution in launcher.distributions:
        pattern = f"lib/python3*/site-packages/{distribution}-*.dist-info"
        for folder in sorted(program.parent.parent.glob(pattern)):
            version = folder.name.removeprefix(f"{distribution}-").removesuffix(".dist-info")
            return Installed(program, python if python.exists() else None, distribution, parse(version))
    if launcher.distributions and launcher.start_module:  # a Python program whose distribution is somewhere else
        return Installed(program, None, None, None)
    return Installed(program, None, None, said(program))


def said(program: Path) -> Version | None:
    """llama.cpp says `version: 11434 (abc)`, and `build 0` where it was built outside its repository."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stdout + done.stderr
    match = re.search(r"version: b?(\d{3,})\b", text) or re.search(r"build (\d{3,})", text)
    if match:
        return (int(match[1]),)
    plain = re.search(r"\d+\.\d+\.\d+", text)
    return parse(plain[0]) if plain and "build 0" not in text else None


def command(launcher: Program, words: tuple[str, ...], installed: Installed | None) -> list[str]:
    """`words` with the programs that are really there; a program that lacks its own distribution is run as a module."""
    if installed is None:
        return list(words)
    if words[0] == "python" and installed.python:
        return [str(installed.python), *words[1:]]
    if words[0] != launcher.program:
        return list(words)
    if launcher.start_module and installed.python and installed.distribution != launcher.distributions[0]:
        return [str(installed.python), "-m", launcher.start_module, *launcher.as_module(words)]
    return [str(installed.program), *words[1:]]
