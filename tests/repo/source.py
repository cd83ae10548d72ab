"""The package's source, parsed once for the tests of this folder."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "headstart"


@cache
def trees() -> dict[str, ast.Module]:
    """Syntax tree of each file, by path relative to the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text("utf-8")) for path in paths}


def imported_modules(path: str, tree: ast.Module) -> list[tuple[str, int]]:
    """Absolute names and lines of all imports of a file, including those in functions and for type checkers."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found
