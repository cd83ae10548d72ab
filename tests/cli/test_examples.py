"""Command lines of README.md, the quick start, the cookbook and `--help` run with tiny models and less work. Lines that
need a server may fail with exit code 2."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from first_minute import SMALL, commands, isolated_folder, run
from tiny_models import write_tiny

from headstart.cli.app import application

pytestmark = pytest.mark.slow  # many command lines
ROOT = Path(__file__).parents[2]
GUIDES = tuple(ROOT / "docs" / f"{name}.md" for name in ("commands", "quickstart"))
DOCUMENTS = (ROOT / "README.md", *GUIDES, *sorted((ROOT / "docs" / "cookbook").glob("*.md")))
MODELS = ("my-model", "model", "original", "org/model", "org/original", "deepseek-ai/DeepSeek-V3", "DeepSeek-V3",
          "Qwen3.5-9B", "qwen3.5-2b", "my-finetune", "smollm2-mimo", "my-eagle3",
          "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF")  # fmt: skip
LESS = {
    "--minutes": "0.002", "--max-tokens": "2", "--tokens": "40", "--pairs": "1", "--output-tokens": "2",
    "--repeats": "1", "--scale": "0.005", "--concurrency": "1", "--workload": "code", "--temperature": "0",
    "--modes": "off,1", "--rows": "1,2", "--context": "64", "--max-model-len": "512",
}  # fmt: skip
"""Options and smaller values, for less work."""
LITTLE = {
    **{name: SMALL[name][1:] for name in ("demo", "generate", "chat", "serve", "verify", "tune", "bench run")},
    "data": ("--tokens", "4", "--max-tokens", "2"),
    "launch": ("--dry-run",),
}
"""Options that are added to lines without them, for less work."""
ONLY_READ = (
    "--against transformers", "--full", "--numerics", "--from-scratch", "--gpu here", "bench step", "tune", "--preset",
    "headstart train", "graft ./my-finetune", "--program ./build/bin", "verify ./my-model", "my-head", "--to vllm",
    "headstart adapt my-records", "--to gguf", "headstart data", "--drafters mtp", "headstart pull", "models remove",
    "--image",
)  # fmt: skip
"""Lines with long work or for another engine's program: only parsed here, run by other tests."""
NO_SERVER = ("probe", "headstart gate", "--url", "headstart ps", "headstart stop")


def help_lines() -> list[str]:
    entries = [*application().commands.values(), *commands().values()]
    return [line for entry in entries for line in entry.examples]


def readme_lines() -> list[str]:
    texts = [path.read_text("utf-8") for path in DOCUMENTS]
    return [line.strip() for text in texts for line in re.findall(r"^\$ (headstart .*)", text, re.MULTILINE)]


LINES = dict.fromkeys(
    line.partition("  #")[0].strip() for line in (*readme_lines(), *help_lines()) if "curl" not in line
)


@pytest.fixture(scope="module", autouse=True)
def example_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder with the files that the examples name; the default model is a tiny one."""
    folder = tmp_path_factory.mktemp("examples")
    with isolated_folder(folder) as paths, mock.patch("headstart.hub.DEFAULT_MODEL", paths["MODEL"]):
        for name in MODELS:
            shutil.copytree(paths["MODEL"], name)
        for name in ("models/a", "models/b"):
            shutil.copytree(paths["MODEL"], name)
        write_tiny("nemotron_h", Path("elastic-30b"))
        for name in ("texts", "docs", "12b"):
            Path(name).mkdir()
        shutil.copy("elastic-30b/config.json", "12b")
        for name in ("texts.jsonl", "texts/texts.jsonl"):
            shutil.copy(paths["TEXTS"], name)
        for name in ("docs/guide.md", "task.txt"):
            Path(name).write_text("Why is the sky blue?\n")
        for name in ("prompts.jsonl", "my-prompts.jsonl"):
            Path(name).write_text('{"prompt": "Why is the sky blue?"}\n')
        Path("my-settings.toml").write_text("threads = 1\n")
        Path("keys.toml").write_text("[alice]\nkey = 'a'\n")
        Path("question.jsonl").write_text('{"category": "writing", "turns": ["Why is the sky blue?"]}\n')
        assert run(("bench", *SMALL["bench run"][1:], "--out", "before.json")).code == 0
        shutil.copy("before.json", "after.json")
        yield


@pytest.mark.parametrize("line", LINES)
def test_example_line_runs(line: str) -> None:
    before, _, piped = line.rpartition("| ")
    words = shlex.split(piped)[1:]
    words = _with_little_work([LESS.get(flag, word) for flag, word in zip(["", *words], words, strict=False)])
    if "--url" not in line and any(part in line for part in ONLY_READ):
        words = [word for word in words if word != "--json"] + ["--help"]
    else:
        _remove_outputs(words)
    outcome = run(tuple(words), stdin=before)
    assert not outcome.faults(), outcome.shown()
    assert outcome.code in ((2,) if any(part in line for part in NO_SERVER) else (0, 1)), outcome.shown()


def _remove_outputs(words: list[str]) -> None:
    for flag in ("-o", "--out", "--report"):
        if flag in words and (path := Path(words[words.index(flag) + 1])).exists():
            assert path.parts[0] not in ("/", ".."), "an example writes outside the folder"
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _with_little_work(words: list[str]) -> list[str]:
    """Adds the options of LITTLE that the line does not set."""
    name = words[0] if words[0] != "bench" else "bench step" if words[1:2] == ["step"] else "bench run"
    if {"--compare", "--url", "--translate", "--prompt-file"} & set(words):
        return words
    groups: list[list[str]] = []
    for word in LITTLE.get(name, ()):
        groups = [*groups, [word]] if word.startswith("--") else [*groups[:-1], [*groups[-1], word]]
    if "--engine" in words:
        groups = []
    if {"--transcript", "--against"} & set(words):  # transcripts accept few other options
        groups = [group for group in groups if group[0] == "--max-tokens"]
    more = [word for group in groups if group[0] not in words for word in group]
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *more, *words[end:]]


def test_python_code_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", DOCUMENTS[0].read_text("utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out
