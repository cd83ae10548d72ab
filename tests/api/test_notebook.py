"""docs/python.ipynb and the cookbook's Python code without a server run."""

import ast
import asyncio
import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOK = DOCS / "python.ipynb"
BLOCKS = [
    (path.name, code)
    for path in sorted((DOCS / "cookbook").glob("*.md"))
    for code in re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    if "localhost" not in code
]


@pytest.mark.slow
def test_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = compile(source, NOTEBOOK.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    asyncio.run(eval(code, {"__name__": "notebook"}))
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_cookbook_code_runs(name: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, name, "exec"), {"__name__": name})
    assert capsys.readouterr().out
