"""Compare the structure of checkouts: files and lines by room, sizes of files and functions, class names defined twice,
import circles, files touched by one addition, words of documents, test seconds by room, calls down to the kernels.

    python benchmarks/structure.py OLD NEW          # checkouts, each with its own .venv

Lines are all lines. An import circle is a set of files that import each other, directly or through others: at import
time, or also inside functions and for type checkers. "Files touched" counts files that mention one existing family, one
sampling parameter, one endpoint. Hops are the Python functions on the stack when the default model's trunk pass enters
the compiled kernels, `generate` included (run with each checkout's own interpreter).
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

Graph = dict[str, set[str]]
Row = tuple[str, str]
SOURCES = {"headstart": ("*.py",), "csrc": ("*.cpp", "*.h"), "tests": ("*.py",), "benchmarks": ("*.py",)}
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md")
ADDITIONS = {
    "a family (mellum)": "mellum", "a sampling parameter (min_p)": "min_p", "an endpoint (/tokenize)": "/tokenize",
}  # fmt: skip
AREAS = {"package": ("headstart",), "repository": ("headstart", "tests", "benchmarks", "docs", "*.md")}
HOPS = """
import sys
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
paths = []
def listening(run):
    def heard(self, *arguments, **options):
        frame, names = sys._getframe(1), []
        while frame and names[-1:] != ["LLM.generate"]:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        paths.append(names[::-1])
        return run(self, *arguments, **options)
    return heard
llm = LLM(None, EngineConfig(depth=0))
(native,) = (module for name, module in sys.modules.items() if name.endswith("._native"))
for each in vars(native).values():
    if isinstance(each, type) and hasattr(each, "run"):
        each.run = listening(each.run)
llm.generate(["Hi"], SamplingParams(max_tokens=1))
print(len(paths[0]), " > ".join(paths[0]))
"""


def num_lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def sources(root: Path, folder: str) -> list[Path]:
    return sorted(path for pattern in SOURCES[folder] for path in (root / folder).rglob(pattern))


def sizes(root: Path) -> Iterator[Row]:
    """Files and lines of each folder, and of each room of the package."""
    for folder in SOURCES:
        paths = sources(root, folder)
        yield f"{folder}/", f"{len(paths)} files, {sum(map(num_lines, paths))} lines"
    rooms: dict[str, list[Path]] = {}
    for path in sources(root, "headstart"):
        parts = path.relative_to(root / "headstart").parts
        rooms.setdefault(f"{parts[0]}/" if len(parts) > 1 else "*.py", []).append(path)
    for room, paths in sorted(rooms.items()):
        yield f"headstart/{room}", f"{len(paths)} files, {sum(map(num_lines, paths))} lines"


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body without its docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def definitions(root: Path) -> Iterator[Row]:
    """Sizes of files and functions; public class names that several files define."""
    paths = sources(root, "headstart")
    file = max(paths, key=num_lines)
    yield "median file", f"{statistics.median(map(num_lines, paths)):.0f} lines"
    yield "files below 60 lines", str(sum(num_lines(path) < 60 for path in paths))
    yield "longest file", f"{num_lines(file)} lines, {file.relative_to(root)}"
    nodes = [(node, path) for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    functions = [(node, path) for node, path in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines, name, path = max(((node.end_lineno or 0) - node.lineno + 1, node.name, path) for node, path in functions)
    yield "longest function", f"{lines} lines, {name} in {path.relative_to(root)}"
    short = sum(body_lines(node) <= 3 for node, _ in functions)
    yield "functions of at most 3 lines", f"{short} of {len(functions)} ({short / len(functions):.0%})"
    classes = {(node.name, path) for node, path in nodes if isinstance(node, ast.ClassDef) and node.name[0] != "_"}
    counts = Counter(name for name, _ in classes)
    yield "class names defined more than once", str(sum(count > 1 for count in counts.values()))


def additions(root: Path) -> Iterator[Row]:
    """Files that mention one example of what people add."""
    for title, word in ADDITIONS.items():
        for area, folders in AREAS.items():
            found = subprocess.run(
                ["git", "grep", "-liE", rf"(^|[^a-z0-9_]){word}([^a-z0-9_]|$)", "--", *folders],
                cwd=root, capture_output=True, text=True, check=False,
            )  # fmt: skip
            yield f"files that mention {title}, {area}", str(len(found.stdout.split()))


def words(root: Path) -> Iterator[Row]:
    paths = sorted({path for pattern in DOCUMENTS for path in root.glob(pattern)})
    yield "words of documents", str(sum(len(path.read_text("utf-8").split()) for path in paths))
    yield "README.md", f"{(root / 'README.md').stat().st_size} bytes"


def test_seconds(root: Path) -> Iterator[Row]:
    """From the last run's report (pytest --durations=0), where the checkout has one."""
    report = root / "build" / "test-durations.txt"
    seconds: Counter[str] = Counter()
    for line in report.read_text("utf-8").splitlines() if report.exists() else ():
        if match := re.match(r"([\d.]+)s (?:call|setup|teardown) +tests/([\w/]+?)(?:/test_\w+)?\.py::", line):
            seconds[match[2].split("/")[0]] += float(match[1])
    for room, total in sorted(seconds.items()):
        yield f"test seconds, {room}", f"{total:.0f}"


def imports(root: Path, *, lazy: bool) -> Graph:
    """Module -> modules of the package that it imports; `lazy`: also inside functions and for types."""
    modules = {}
    for path in sources(root, "headstart"):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text("utf-8"))
    graph: Graph = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in ast.walk(tree) if lazy else statements(tree.body):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names if alias.name in modules}
            elif isinstance(node, ast.ImportFrom):
                each = (f"{node.module}.{alias.name}" for alias in node.names)
                graph[name] |= {full if full in modules else str(node.module) for full in each}
        graph[name] = (graph[name] & modules.keys()) - {name}
    return graph


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a module is imported."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            for field in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, field, []))


def reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def circles(graph: Graph) -> list[list[str]]:
    """Sets of modules that reach each other."""
    far = {name: reached(graph, name) for name in graph}
    found = {frozenset(other for other in far[name] if name in far[other]) for name in graph if name in far[name]}
    return sorted(sorted(each) for each in found)


def circle_rows(root: Path) -> Iterator[Row]:
    for title, lazy in (("circles at import", False), ("circles by any import", True)):
        found = circles(imports(root, lazy=lazy))
        yield title, "; ".join([str(len(found)), *(" ".join(each) for each in found)]).replace("headstart.", "")


def hops(root: Path) -> Iterator[Row]:
    python = root / ".venv/bin/python"
    done = subprocess.run([python, "-c", HOPS], cwd=root, capture_output=True, text=True, check=False)
    yield "hops to the kernels", done.stdout.strip() or f"not measured: {done.stderr.strip()[-200:]}"


PARTS = (sizes, definitions, circle_rows, additions, words, test_seconds, hops)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="+")
    args = parser.parse_args()
    columns = []
    for given in args.checkouts:
        root = given.resolve()
        columns.append(dict(row for part in PARTS for row in part(root)))
    names = list(dict.fromkeys(name for column in columns for name in column))
    print("| | " + " | ".join(str(each) for each in args.checkouts) + " |\n|" + "---|" * (len(columns) + 1))
    for name in names:
        print(f"| {name} | " + " | ".join(column.get(name, "-") for column in columns) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
