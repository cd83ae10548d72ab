"""docs/python.ipynb runs from top to bottom."""

from __future__ import annotations

import ast
import asyncio
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs/python.ipynb"


@pytest.mark.slow
def test_every_cell_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = compile(source, NOTEBOOK.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    asyncio.run(eval(code, {"__name__": "notebook"}))
    assert capsys.readouterr().out
