"""Checks the wheel in bare environments: `make wheel`, or `python tests/wheel.py WHEEL [--python PROGRAM ...]`

Checks the wheel's files. For each Python found, installs the wheel into an environment without torch, with binary
wheels of the package index only and no compiler in PATH, runs `--version` and `doctor`, and compares generated texts.
With qemu's user mode, generates a text on old processors, too. Needs the standard library only.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VERSIONS = range(11, 20)
ASKED = ("--prompt", "Why is the sky blue?", "--max-tokens", "32", "--temperature", "0", "--json")
MODELS = ("qwen3_5-tiny", "")
"""The model in the package, and the default model, which is fetched or cached."""
OLD = ("Nehalem", "Haswell")
"""Processors of x86-64-v2 and x86-64-v3."""
USELESS = re.compile(r"(^|/)(tests?|docs|csrc|benchmarks|__pycache__)/|\.(pyc|cpp|o|a|toml\.orig|jsonl)$")


@dataclass(frozen=True)
class TriedEnvironment:
    """An environment with the wheel and the texts generated there."""

    name: str
    python: Path
    texts: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", action="append", help="A program to try it with. Default: all that are found.")
    options = parser.parse_args()
    check_contents(options.wheel)
    found = options.python or list(pythons())
    tried = []
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        for number, program in enumerate(found):
            tried.append(try_wheel(options.wheel, program, Path(folder) / str(number)))
        if len({each.texts for each in tried}) > 1:
            raise SystemExit(f"texts differ: { {each.name: each.texts for each in tried} }")
        old_processors(tried[0])
    absent = [
        f"3.{minor}" for minor in VERSIONS if minor < 15 and not any(f"3.{minor}." in each.name for each in tried)
    ]
    if absent:
        print(f"not tried: Python {', '.join(absent)} (not found; --python PROGRAM)")
    return 0


def check_contents(wheel: Path) -> None:
    """Prints sizes by folder. Raises SystemExit for files that do not belong into a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        members = [each for each in archive.infolist() if not each.is_dir()]
    if useless := [each.filename for each in members if USELESS.search(each.filename)]:
        raise SystemExit(f"{wheel.name} holds what nobody needs: {useless}")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {len(members)} files")
    sizes: dict[str, int] = {}
    for each in members:
        large = each.compress_size > 100_000
        name = each.filename if large else f"{each.filename.partition('/')[0]}, files below 100 kB"
        sizes[name] = sizes.get(name, 0) + each.compress_size
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"  {size / 1e6:6.2f} MB  {name}")


def pythons() -> Iterator[str]:
    """One working Python of each version, in PATH or of pyenv."""
    kept = [str(each) for each in Path("~/.pyenv/versions").expanduser().glob("*/bin")]
    places = os.environ.get("PATH", os.defpath).split(os.pathsep) + kept
    for minor in VERSIONS:
        found = [path for place in places if (path := shutil.which(f"python3.{minor}", path=place))]
        starts = (
            path for path in found if not subprocess.run([path, "-V"], capture_output=True, check=False).returncode
        )
        yield from list(starts)[:1]


def try_wheel(wheel: Path, program: str, home: Path) -> TriedEnvironment:
    """Installs the wheel for a Python and generates texts. Raises SystemExit on any failure."""
    begun = time.monotonic()
    run([program, "-m", "venv", "--without-pip", str(home)])
    python = home / "bin" / "python"
    version = run([str(python), "-c", "import platform; print(platform.python_version())"]).strip()
    print(f"Python {version}", flush=True)
    pip = [program, "-m", "pip", "--python", str(python), "install", "--quiet", "--only-binary=:all:", str(wheel)]
    run(pip)
    site = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    size = sum(path.stat().st_size for path in Path(site).rglob("*") if path.is_file())
    print(f"  installed in {time.monotonic() - begun:.0f} s, {size / 1e6:.0f} MB with all that it needs")
    if subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False).returncode == 0:
        raise SystemExit("torch is there: nothing is shown")
    bare = os.environ | {"PATH": str(home / "bin"), "VIRTUAL_ENV": str(home)}
    headstart = str(home / "bin" / "headstart")
    print(f"  {run([headstart, '--version'], bare).strip()}")
    doctor = json.loads(run([headstart, "doctor", "--json"], bare))
    if doctor["backend"]["name"] != "native" or doctor["compiler"]:
        raise SystemExit(f"not bare, or not native: {doctor['backend']}, compiler {doctor['compiler']}")
    print(f"  backend {doctor['backend']['name']}: {doctor['backend']['why']}; no compiler, no torch")
    texts = []
    for model in MODELS:
        begun = time.monotonic()
        answer = json.loads(run([headstart, "generate", *filter(None, [model]), *ASKED], bare))
        texts.append(answer["text"])
        speed = answer["timing"]["decode_tokens_per_s"]
        seconds = time.monotonic() - begun
        print(f"  {model or 'default model'}: {seconds:.1f} s, {speed:.0f} tokens/s: {answer['text'][:60]!r}")
    return TriedEnvironment(f"{version}.", python, tuple(texts))


def old_processors(tried: TriedEnvironment) -> None:
    """Generates a text on old processors: this shows that no newer instruction is used. Texts may differ there."""
    qemu = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if not qemu:
        print("not tried: older processors (qemu-x86_64 of Debian's qemu-user is not installed)")
        return
    paths = "from headstart.kernels.native import _native; print(*_native.paths())"
    # OPENBLAS_ variables may choose kernels that old processors lack
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    for name in OLD:
        begun = time.monotonic()
        command = [qemu, "-cpu", name, str(tried.python), "-P"]  # the wheel's package, not the checkout's
        found = run([*command, "-c", paths], plain).strip()
        asked = ["-m", "headstart", "generate", MODELS[0], *ASKED, "--max-tokens", "8", "--threads", "1"]
        answer = json.loads(run([*command, *asked], plain))
        print(f"  as {name} ({found}): {time.monotonic() - begun:.0f} s: {answer['text']!r}")


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
