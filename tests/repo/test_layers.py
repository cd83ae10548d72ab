"""Rules on the source: import order, no cycles, torch in kernels and train only, family names in their files only."""

import ast
import re
from functools import cache

import pytest
from source import PACKAGE, imported_modules, trees

from headstart import registry

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "core",
        "params",
        "stats",
        "config",
        "options",
        "errors",
        "noise",
        "wording",
        "registry",
        "files",
        "system",
        "hub",
        "machine",
        "svg",
        "_download",
        "placeholder",
        "version",
        "exact",
    ),
    ("text", "formats", "kernels"),
    ("layers", "cache"),
    ("heads", "models", "drafters"),
    ("engine",),
    ("api", "server", "train", "tools"),
    ("cli",),
)
"""From the bottom. Siblings import those before them; on the lowest floor there are only no circles."""
RANKS = {part: (floor, place if floor else 0) for floor, parts in enumerate(LAYERS) for place, part in enumerate(parts)}
COMMANDS = ("inspect", "doctor", "export", "graft", "verify", "bench", "tune", "adapt", "plan", "probe", "launch",
            "gate")  # fmt: skip
"""Folders and modules of tools/: a command uses those before it, and other modules beside the folders."""
TORCH_FOLDERS = ("kernels", "train")
FAMILIES = set(registry.available("models"))
FOREIGN_NAMES = {
    "heads/assistant.py", "heads/block.py", "heads/eagle3.py", "heads/layouts/reading.py", "heads/layouts/writing.py",
    "formats/gguf_names.py",
    "text/_gguf_tokenizer.py", "text/pre_tokenizers.py", "tools/export/gguf_model.py",
    "tools/export/targets/vllm_mimo.py", "tools/export/targets/gguf.py", "tools/export/targets/speculators.py",
    "tools/export/targets/vllm_eagle.py", "tools/launch/launchers/sglang.py",
}  # fmt: skip
"""Files that translate other projects' vocabulary: GGUF names kinds of tokenizers, EAGLE-3 its layout, an assistant the
models that it drafts for."""
SHARED_WORDS = {"llama", "mimo"}
"""Families whose name is also that of a project, a format or a tokenizer kind: only exact identifiers count."""


def part_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def test_every_part_of_the_package_has_a_rank() -> None:
    parts = {part_of(path) for path in trees()} - {"__init__", "__main__"}
    assert parts <= RANKS.keys(), f"give {sorted(parts - RANKS.keys())} a floor in docs/ARCHITECTURE.md and here"


@pytest.mark.slow
def test_imports_only_go_down() -> None:
    wrong = []
    for path, tree in trees().items():
        for module, line in imported_modules(path, tree):
            parts = module.split(".")
            other = parts[1] if parts[0] == "headstart" and len(parts) > 1 else ""
            low, high = RANKS.get(part_of(path)), RANKS.get(other)
            if low and high and high > low:
                wrong.append(f"{path}:{line} ({low}) imports {module} ({high})")
    assert not wrong, "\n".join(wrong)


def test_commands_import_earlier_commands_only() -> None:
    folders = {path.split("/")[1] for path in trees() if path.startswith("tools/") and path.count("/") > 1}
    modules = {path.split("/")[1].removesuffix(".py") for path in trees() if path.startswith("tools/")}
    assert folders <= set(COMMANDS) <= folders | modules
    wrong = []
    for path, tree in trees().items():
        place = path.split("/")[1].removesuffix(".py") if path.startswith("tools/") else ""
        for module, line in imported_modules(path, tree) if place else ():
            other = module.removeprefix("headstart.tools.").split(".")[0]
            if other in COMMANDS and other != place and other not in COMMANDS[: _index(place)]:
                wrong.append(f"{path}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def _index(command: str) -> int:
    """Position in COMMANDS. Other modules of tools/ have 0, as they import no command."""
    return COMMANDS.index(command) if command in COMMANDS else 0


@pytest.mark.slow
def test_private_names_are_imported_in_their_folder_only() -> None:
    wrong = []
    for path, tree in trees().items():
        for module, line in imported_modules(path, tree):
            home = private_folder_of(module)
            if home is not None and not path.startswith(home):
                wrong.append(f"{path}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def private_folder_of(name: str) -> str | None:
    """The folder to which a module or name is private (None: public)."""
    first, *parts = name.split(".")
    places = [place for place, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
    if first != "headstart" or not places:
        return None
    folder = "".join(f"{part}/" for part in parts[: places[0]])
    return folder if (PACKAGE / folder).is_dir() else "".join(f"{part}/" for part in parts[: places[0] - 1])


@pytest.mark.slow
def test_no_import_cycles() -> None:
    """No file imports itself through others. Imports in functions and for type checkers count."""
    reached = {path: _reachable_files(path) for path in trees()}
    circles = {
        frozenset({path, *(other for other in seen if path in reached[other])}) for path, seen in reached.items()
    }
    assert not [sorted(circle) for circle in circles if len(circle) > 1]


def _reachable_files(path: str) -> set[str]:
    """All files that a file imports directly or through others."""
    seen: set[str] = set()
    left = [path]
    while left:
        new = _imported_files(left.pop()) - seen
        seen |= new
        left += new
    return seen


@cache
def _imported_files(path: str) -> set[str]:
    names = [name for name, _ in imported_modules(path, trees()[path])]
    return {file for name in names if (file := _file_of(name)) is not None and file != path}


def _file_of(name: str) -> str | None:
    """The file of a module or of a name in a module."""
    parts = name.split(".")[1:]
    if name.split(".")[0] != "headstart":
        return None
    for end in range(len(parts), 0, -1):
        stem = "/".join(parts[:end])
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if file in trees():
                return file
    return None


@pytest.mark.slow
def test_torch_only_behind_kernels_and_train() -> None:
    wrong = [
        f"{path}:{line}"
        for path, tree in trees().items()
        for module, line in imported_modules(path, tree)
        if module.split(".")[0] == "torch" and path.split("/")[0] not in TORCH_FOLDERS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_no_import_of_transformers_at_run_time() -> None:
    wrong = [
        f"{path}:{line}"
        for path, tree in trees().items()
        for module, line in imported_modules(path, tree)
        if module.split(".")[0] == "transformers" and path != "tools/verify/references.py"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_family_name_only_in_its_file(family: str) -> None:
    words = re.compile(rf"(?<![a-z0-9]){family}(?![a-z0-9])")
    wrong = []
    for path, tree in trees().items():
        if (
            path.startswith("models/")
            or path in FOREIGN_NAMES
            or family not in (PACKAGE / path).read_text("utf-8").lower()
        ):
            continue
        found = [(text, line) for text, line in _code_words(tree, family) if words.search(text.lower())]
        wrong += [f"{path}:{line}: {text[:60]!r}" for text, line in found]
    assert not wrong, "\n".join(wrong)


def _code_words(tree: ast.Module, family: str) -> list[tuple[str, int]]:
    """Identifiers and string constants with their lines, without docstrings."""
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            found.append((node.id, line))
        elif isinstance(node, ast.Attribute):
            found.append((node.attr, line))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append((node.name, line))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if family in SHARED_WORDS and node.value != family:
                continue
            found.append((node.value, line))
    return found


def test_cpu_features_are_detected_in_one_file() -> None:
    """Two detections once chose different paths for matrices and for the sampler."""
    csrc = PACKAGE.parent / "csrc"
    asking = [path.name for path in csrc.iterdir() if "__builtin_cpu_supports" in path.read_text()]
    assert asking == ["cpu.cpp"]


def test_instruction_set_flags_are_for_kernel_files_only() -> None:
    """A global flag would crash the wheel on older processors before the path is chosen."""
    lines = (PACKAGE.parent / "CMakeLists.txt").read_text("utf-8").splitlines()
    given = [line.strip() for line in lines if re.search(r"(?<![\w-])-m[a-z]", line)]
    of_paths = ("set(flags_", "list(APPEND flags_", "check_cxx_compiler_flag(", "${flags_avx512bf16}")
    assert given
    assert not [line for line in given if not line.startswith(of_paths)]


OF_OS = ("chown", "fork", "getloadavg", "getpgid", "geteuid", "getuid", "kill", "killpg", "mkfifo", "nice",
         "sched_getaffinity", "sched_setaffinity", "setsid", "statvfs", "sync", "sysconf", "umask", "uname",
         "waitpid")  # fmt: skip
OF_SIGNAL = ("SIGALRM", "SIGHUP", "SIGKILL", "SIGPROF", "SIGUSR1", "SIGXCPU", "alarm", "pause", "setitimer", "sigwait")
ONLY_SOMEWHERE = {
    "fcntl", "grp", "mmap", "msvcrt", "pty", "pwd", "readline", "resource", "select", "termios", "tty", "winreg",
    *(f"os.{name}" for name in OF_OS), *(f"signal.{name}" for name in OF_SIGNAL),
}  # fmt: skip
"""Modules and names that Windows does not have, or macOS, or that differ there."""


@pytest.mark.slow
def test_os_specific_names_are_used_in_system_py_only() -> None:
    wrong = []
    for path, tree in trees().items():
        if path == "system.py":
            continue
        found = [(name.split(".")[0], line) for name, line in imported_modules(path, tree)]
        found += [(ast.unparse(node), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        wrong += [f"{path}:{line} {name}" for name, line in found if name in ONLY_SOMEWHERE]
    assert not wrong, "\n".join(wrong)
