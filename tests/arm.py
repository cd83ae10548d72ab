"""Tests of the kernels for ARM on another machine: `make test-arm`, or `python -m tests.arm [PYTEST'S ARGUMENTS]`.

Cross-compiles csrc/ and runs tests/kernels with Debian's arm64 Python under qemu's user mode, as three processors.
Each has one instruction-set path more than the one before: an instruction that the processor lacks ends the test.
The oracle is torch for arm64. Texts are bit for bit those of x86. Files go to build/arm; nothing is installed.

`make wheel-arm`, or `python -m tests.arm --wheel`: builds the wheel for ARM in dist/arm and generates a text with it on
each processor, with binary wheels of the package index only.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / "build" / "arm"
SYSTEM, SITE, NEEDS, SOURCE, CMAKE, BARE = (
    HOME / name for name in ("system", "site", "needs", "source", "cmake", "bare")
)
DIST = ROOT / "dist" / "arm"
PLATFORMS = ("linux", *(f"manylinux{age}" for age in ("_2_34", "_2_31", "_2_28", "_2_27", "_2_17", "2014")))
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
QEMU = "qemu-aarch64-static" if shutil.which("qemu-aarch64-static") else "qemu-aarch64"
NEEDED = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", QEMU: "qemu-user", "cmake": "cmake", "apt-get": "apt",
    "dpkg": "dpkg",
}  # fmt: skip


@dataclass(frozen=True)
class Processor:
    """A processor of qemu: its expected paths, the best first, and `leaves`, the paths that other processors test."""

    name: str
    paths: tuple[str, ...]
    leaves: tuple[str, ...] = ()
    torch: bool = True  # False: torch needs instructions that this processor lacks


PROCESSORS = (
    Processor("cortex-a72", ("neon", "portable"), torch=False),  # ARMv8.0
    Processor("neoverse-n1", ("dotprod", "neon", "portable")),
    Processor("max", ("i8mm", "dotprod", "neon", "portable"), leaves=("dotprod", "neon", "portable")),
)
SAME = ("numpy", "gguf", "pytest", "hypothesis", "iniconfig", "packaging", "pluggy", "pygments", "sortedcontainers")
OTHERS = ("tqdm", "pyyaml", "typing-extensions", "torch==2.10.*")  # later torch for arm64 requires CUDA's libraries
BITS = ("native_ops",)  # fixed bits, without an oracle
TESTS = (*BITS, "native_oracle", "native_rows", "native_experts", "native_fuzz", "native_choice", "native_streams")
TESTS += ("native_sampling", "native_pool", "refine", "packing", "philox", "sampling")
RECURRENT = "tests/contract/test_rollback.py"
TEXTS = "tests/contract/test_portable_bits.py"


def run(*command: str | Path, **options: object) -> None:
    subprocess.run([str(word) for word in command], check=True, **options)  # type: ignore[call-overload]


def fetch_system() -> None:
    """Unpacks Debian's arm64 packages of Python and its headers, with separate apt lists and status."""
    apt = HOME / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    options = {"APT::Architecture": "arm64", "APT::Architectures::": "arm64", "Dir::State": apt, "Debug::NoLocking": 1}
    options |= {"Dir::State::Lists": apt / "lists", "Dir::State::status": apt / "status", "Dir::Cache": apt / "cache"}
    command = ["apt-get", "-qq", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    run(*command, "update")
    packages = (f"python{PYTHON}", f"libpython{PYTHON}-dev", "libstdc++6")
    run(*command, "install", "--yes", "--download-only", "--no-install-recommends", *packages)
    for package in (apt / "cache" / "archives").glob("*.deb"):
        run("dpkg", "-x", package, SYSTEM.with_suffix(".new"))
    SYSTEM.with_suffix(".new").rename(SYSTEM)


def install(target: Path, *wanted: str | Path) -> None:
    """Installs wheels for arm64 into `target`."""
    platforms = [f"--platform={age}_aarch64" for age in PLATFORMS]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", *platforms]
    run(*command, f"--python-version={PYTHON}", "--target", target.with_suffix(".new"), *wanted)
    target.with_suffix(".new").rename(target)


def fetch_site() -> None:
    """Installs the test dependencies. pip would resolve requirements for this machine's processor, so all are named."""
    install(SITE, "--no-deps", *(f"{name}=={version(name)}" for name in SAME), *OTHERS)


def fetch_needs() -> None:
    """Installs the package's dependencies, for generating texts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install(NEEDS, *(each for each in project["dependencies"] if not each.startswith("nanobind")))


def settings() -> dict[str, str | Path]:
    """CMake definitions for cross-compiling the module."""
    include = SYSTEM / "usr" / "include"
    return {
        "CMAKE_BUILD_TYPE": "Release", "CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++", "CMAKE_CXX_FLAGS": f"-idirafter {include}",
        "Python_EXECUTABLE": sys.executable, "Python_INCLUDE_DIR": include / f"python{PYTHON}",
    }  # fmt: skip


def build() -> None:
    """Builds the extension and copies the package with it to SOURCE."""
    soabi = f"cpython-{PYTHON.replace('.', '')}-aarch64-linux-gnu"
    defined = [f"-D{key}={value}" for key, value in (settings() | {"SKBUILD_SOABI": soabi}).items()]
    run("cmake", "-S", ROOT, "-B", CMAKE, *defined, stdout=subprocess.DEVNULL)
    run("cmake", "--build", CMAKE, "--parallel", str(os.cpu_count()), stdout=subprocess.DEVNULL)
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "headstart", SOURCE / "headstart", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module in CMAKE.glob("_native.*.so"):
        shutil.copy(module, SOURCE / "headstart" / "kernels" / "native")


def build_wheel() -> Path:
    """Builds the wheel for every CPython from 3.11 on, as `make wheel`."""
    shutil.rmtree(DIST, ignore_errors=True)
    words = [word for key, value in settings().items() for word in ("-C", f"cmake.define.{key}={value}")]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", *words]
    host = os.environ | {"_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    run(*command, "-C", f"build-dir={HOME / 'wheel'}", "--wheel-dir", DIST, ROOT, env=host)
    (wheel,) = DIST.glob("*.whl")
    return wheel


def try_wheel(wheel: Path) -> int:
    """Generates a text with the wheel on each processor. Returns 0 if all texts are equal."""
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
    shutil.rmtree(BARE, ignore_errors=True)
    install(BARE, wheel)
    asked = ("generate", "qwen3_5-tiny", "--prompt", "Once upon a time", "--max-tokens", "16", "--json")
    texts = set()
    for processor in PROCESSORS:
        begun = time.monotonic()
        done = python(processor.name, "-m", "headstart", *asked, path=BARE)
        if done.returncode:
            print(done.stdout)
            return 1
        text = json.loads(done.stdout[done.stdout.index("{") :])["text"]
        print(f"  as {processor.name}: {time.monotonic() - begun:.0f} s: {text!r}", flush=True)
        texts.add(text)
    return len(texts) > 1


def python(processor: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Debian's Python on a processor. With -P, as the checkout's package has no module for ARM."""
    command = [QEMU, "-cpu", processor, "-L", SYSTEM, SYSTEM / "usr" / "bin" / f"python{PYTHON}", "-P"]
    env = os.environ | {"PYTHONPATH": str(path or f"{SOURCE}:{SITE}:{NEEDS}"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def check(processor: Processor, arguments: list[str]) -> int:
    """Checks the paths that the processor reports and runs the tests."""
    found = python(processor.name, "-c", "from headstart.kernels.native import _native; print(*_native.paths())")
    if found.stdout.split() != list(processor.paths):
        print(f"{processor.name}: its paths are {' '.join(processor.paths)}, found {found.stdout}", flush=True)
        return 1
    tests = [f"tests/kernels/test_{name}.py" for name in (TESTS if processor.torch else BITS)]
    tests += [TEXTS, RECURRENT] if processor.torch else [TEXTS]
    words = [] if processor.torch else ["--noconftest"]
    words += ["-k", " and ".join(f"not {path}" for path in processor.leaves)] if processor.leaves else []
    chosen = arguments if arguments and processor.torch else tests
    done = python(processor.name, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, *chosen)
    paths = ", ".join(path for path in processor.paths if path not in processor.leaves)
    print(f"{processor.name} ({paths}):\n{done.stdout}", flush=True)
    return done.returncode


def main(arguments: list[str]) -> int:
    missing = {package for command, package in NEEDED.items() if not shutil.which(command)}
    if missing:
        print(f"not installed: {', '.join(sorted(missing))} (packages of Debian and Ubuntu)", file=sys.stderr)
        return 2
    if not SYSTEM.exists():
        fetch_system()
    if arguments == ["--wheel"]:
        return try_wheel(build_wheel())
    if not SITE.exists():
        fetch_site()
    if not NEEDS.exists():
        fetch_needs()
    build()
    with ThreadPoolExecutor(os.cpu_count()) as several:
        return max(several.map(lambda processor: check(processor, arguments), PROCESSORS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
