"""Imports go down only, torch stays behind its doors, family names stay in their files."""

from __future__ import annotations

import ast
import re

import pytest
from source import PACKAGE, imported_modules, trees

LAYERS = {
    "core": 0, "stats": 0, "config": 0, "errors": 0, "registry": 0, "hub": 0, "_wheel": 0,
    "kernels": 1, "formats": 1, "text": 1,
    "layers": 2, "cache": 2,
    "models": 3, "drafters": 3,
    "engine": 4,
    "api": 5, "server": 5, "train": 5, "tools": 5,
    "cli": 6,
}  # fmt: skip
TORCH_FOLDERS = ("kernels", "train")
FAMILIES = {path.stem for path in (PACKAGE / "models").glob("[!_]*.py")}
FOREIGN_NAMES = {
    "formats/_eagle3.py", "formats/gguf_names.py", "text/_gguf_tokenizer.py",
    "tools/export/layouts.py", "tools/export/detect.py", "tools/export/gguf_model.py",
    "tools/export/targets/vllm_mimo.py", "tools/export/targets/gguf.py", "tools/export/targets/speculators.py",
    "tools/export/targets/vllm_eagle.py", "tools/launch/launchers/sglang.py",
}  # fmt: skip
"""Files that translate other projects' vocabulary: GGUF names kinds of tokenizers, EAGLE-3 its layout, xLLM its drafts
by families."""
SHARED_WORDS = {"llama", "mimo"}
"""Families whose name is also that of a project, a format or a tokenizer kind: only exact identifiers count."""


def layer(module: str) -> int | None:
    parts = module.split(".")
    return LAYERS[parts[1]] if parts[0] == "headstart" and len(parts) > 1 and parts[1] in LAYERS else None


def test_every_part_has_a_layer() -> None:
    parts = {path.split("/")[0].removesuffix(".py") for path in trees()} - {"__init__", "__main__"}
    assert parts <= LAYERS.keys(), f"give {sorted(parts - LAYERS.keys())} a layer in DESIGN and here"


def test_imports_only_go_down() -> None:
    wrong = []
    for path, tree in trees().items():
        own = LAYERS.get(path.split("/")[0].removesuffix(".py"))
        for module, line in imported_modules(path, tree):
            other = layer(module)
            if own is not None and other is not None and other > own:
                wrong.append(f"{path}:{line} (L{own}) imports {module} (L{other})")
    assert not wrong, "\n".join(wrong)


def test_torch_only_behind_kernels_and_train() -> None:
    wrong = [
        f"{path}:{line}"
        for path, tree in trees().items()
        for module, line in imported_modules(path, tree)
        if module.split(".")[0] == "torch" and path.split("/")[0] not in TORCH_FOLDERS
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_of_transformers_at_run_time() -> None:
    wrong = [
        f"{path}:{line}"
        for path, tree in trees().items()
        for module, line in imported_modules(path, tree)
        if module.split(".")[0] == "transformers" and path != "tools/verify/against.py"
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_family_name_only_in_its_file(family: str) -> None:
    words = re.compile(rf"(?<![a-z0-9]){family}(?![a-z0-9])")
    wrong = []
    for path, tree in trees().items():
        if path.startswith("models/") or path in FOREIGN_NAMES:
            continue
        found = [(text, line) for text, line in _code_words(tree, family) if words.search(text.lower())]
        wrong += [f"{path}:{line}: {text[:60]!r}" for text, line in found]
    assert not wrong, "\n".join(wrong)


def _code_words(tree: ast.Module, family: str) -> list[tuple[str, int]]:
    """Identifiers and string constants with lines; docstrings are prose and do not count."""
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
