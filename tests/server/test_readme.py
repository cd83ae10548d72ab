"""curl commands and Python code of README, quick start and cookbook."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from process import Server
from support import PATIENCE

from headstart.cli import serve

pytestmark = pytest.mark.slow  # a server process; examples set max_tokens, or an answer at T = 1 may fill the context
ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "cookbook").glob("*.md")))
TEXTS = {path.name: path.read_text("utf-8") for path in DOCUMENTS}
COMMANDS = [
    line
    for text in TEXTS.values()
    for line in re.findall(r"^\$ (curl .*?)(?=^\$|^```)", text, re.MULTILINE | re.DOTALL)
]
COMMANDS = list(dict.fromkeys([*COMMANDS, *(line for line in serve.run.examples if line.startswith("curl"))]))
CODES = [
    (name, code)
    for name, text in TEXTS.items()
    for code in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if "localhost:8000" in code
]


@pytest.mark.parametrize("command", COMMANDS, ids=[str(i) for i in range(len(COMMANDS))])
def test_curl_examples(server: Server, command: str) -> None:
    assert "localhost:8000" in command
    address = server.url.removeprefix("http://")
    shell = ["bash", "-c", command.replace("localhost:8000", address)]
    done = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert '"error":' not in done.stdout
    if "stream" in command:
        assert done.stdout.rstrip().endswith("[DONE]")
    elif "json_schema" in command:
        assert set(json.loads(json.loads(done.stdout)["choices"][0]["message"]["content"])) >= {"name", "legs"}
    elif "guided_choice" in command:
        assert json.loads(done.stdout)["choices"][0]["message"]["content"] in ("yes", "no")
    elif "guided_regex" in command:
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", json.loads(done.stdout)["choices"][0]["text"])
    elif "metrics" not in command:
        assert json.loads(done.stdout)["choices"]


@pytest.mark.parametrize(("name", "code"), CODES, ids=[name for name, _ in CODES])
def test_python_examples(server: Server, name: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code.replace("http://localhost:8000", server.url), name, "exec"), {"__name__": name})
    assert capsys.readouterr().out


def test_documents_have_examples() -> None:
    assert len(COMMANDS) >= 7
    assert len(CODES) >= 2
