"""Budgets on what separates readable code from the rest: size, swallowed exceptions, globals, environment variables."""

from __future__ import annotations

import ast

from source import PACKAGE, trees

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
BROAD_EXCEPT_ALLOWED = {
    "cli/app.py",  # the process edge
    "engine/async_engine.py",  # a fault of one step must not end the thread
    "server/bridge.py",  # a fault of one step must not end the server
    "server/pipeline.py",  # after the first byte of a stream there is no other way to tell
    "text/tokenizer.py",  # the tokenizers library raises bare Exception for a bad file
    "text/_sentencepiece.py",  # and for bad tables
}
ENVIRONMENT = {
    "HEADSTART_TRACEBACK", "HEADSTART_CACHE", "HEADSTART_API_KEY", "XDG_CACHE_HOME", "LOCALAPPDATA", "NO_COLOR", "TERM",
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


def test_no_broad_except() -> None:
    broad = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        if path not in BROAD_EXCEPT_ALLOWED
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node)
    ]
    assert not broad, "\n".join(broad)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    """Catches everything, and does not raise it again."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    named = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
    raises_again = any(isinstance(node, ast.Raise) and node.exc is None for node in ast.walk(handler))
    return (handler.type is None or bool(named & {"Exception", "BaseException"})) and not raises_again


def test_no_global_statement() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    assert not found, "\n".join(found)


def test_environment_variables_are_known() -> None:
    """Reads of os.environ with a literal or a constant named ..._VARIABLE name a variable of the list."""
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
