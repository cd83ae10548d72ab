"""Limits on file and function length, and the list of environment variables. Ruff checks more (BLE, PLW0603)."""

import ast

from source import PACKAGE, trees

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
ENVIRONMENT = {
    "_HEADSTART_COMPLETE", "HEADSTART_TRACEBACK", "HEADSTART_CACHE", "HEADSTART_API_KEY", "XDG_CACHE_HOME",
    "LOCALAPPDATA", "NO_COLOR", "TERM",
}  # fmt: skip
"""Every environment variable that the package itself reads."""


def test_file_length() -> None:
    lengths = {path: len((PACKAGE / path).read_text("utf-8").splitlines()) for path in trees()}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_function_length() -> None:
    long = [
        f"{path}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_environment_variables_are_known() -> None:
    """Names of variables in reads of os.environ, as literals or constants, are in ENVIRONMENT."""
    unknown = []
    for path, tree in trees().items():
        constants = {
            target.id: node.value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node, argument in _environment_reads(tree):
            name = argument.value if isinstance(argument, ast.Constant) else constants.get(getattr(argument, "id", ""))
            if name not in ENVIRONMENT:
                unknown.append(f"{path}:{node.lineno}: {name or ast.unparse(argument)}")
    assert not unknown, "\n".join(unknown)


def _environment_reads(tree: ast.Module) -> list[tuple[ast.expr, ast.expr]]:
    found: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            found.append((node, node.slice))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            found.append((node, node.args[0]))
    return found
