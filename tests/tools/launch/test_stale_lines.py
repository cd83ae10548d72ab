"""Old command lines from guides, issues and scripts: bash and the engines' argument definitions accept the
translations."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headstart.errors import UsageError
from headstart.tools.launch.arguments import check_arguments, parse_version, table_for
from headstart.tools.launch.command_line import CommandLine, commands
from headstart.tools.launch.translate import find_engine, translate_text

LINES = json.loads(Path(__file__).with_name("stale_lines.json").read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("entry", LINES, ids=[entry["source"] for entry in LINES])
def test_stale_line_is_translated(entry: dict[str, Any]) -> None:
    version = entry.get("version")
    done = translate_text(entry["line"], version, None)
    shell = subprocess.run(["bash", "-n", "-c", done.text], capture_output=True, text=True)
    assert shell.returncode == 0, f"{shell.stderr}\n{done.text}"
    wanted = entry.get("human", "")
    assert bool(done.changes) != entry.get("is_current", False) or wanted
    assert any(wanted in warning for warning in done.warnings) if wanted else not done.warnings, done.warnings
    if not wanted:
        assert not argument_errors(done.text), done.text
        again = translate_text(done.text, version, None) if any(map(find_engine, commands(done.text))) else None
        assert again is None or again.text == done.text


def argument_errors(text: str) -> list[str]:
    """Errors of the argument definitions for the commands of a text."""
    errors = []
    for tokens in commands(text):
        if (found := find_engine(tokens)) is None:
            continue
        launcher, begin = found
        version = parse_version(launcher.newest)
        line = CommandLine.parse(text, tokens, begin, table_for(launcher.name, version), has_model=True)
        words = [part for word in line.words for part in word.text()]
        errors += check_arguments(launcher, version, words).errors
    return errors


def test_yaml_is_translated_and_an_uninspected_head_is_noted() -> None:
    text = "speculative_config:\n  decoding_type: MTP\n  num_nextn_predict_layers: 3\n"
    done = translate_text(text, "1.3.0", None)
    assert done.text == text.replace("num_nextn_predict_layers", "max_draft_len")
    assert done.changes == ["num_nextn_predict_layers -> max_draft_len"]
    assert translate_text(done.text, "1.3.0", None).changes == []
    done = translate_text("vllm serve m --speculative-model qwen3-mtp --num-speculative-tokens 3", "0.20.0", None)
    assert "was not looked at: headstart inspect" in done.changes[-1]


def test_old_decoding_type_is_refused_with_its_successor() -> None:
    with pytest.raises(UsageError, match="decoding_type: MTP, max_draft_len: 3") as caught:
        translate_text('decoding_config.decoding_type = "MEDUSA"', None, None)
    assert caught.value.hint == "headstart launch trtllm MODEL --dry-run writes it"


@pytest.mark.parametrize(("text", "hint"), [
    ("python ktransformers/server/main.py --model_path m --port 10002", "headstart probe"),
    ("lmdeploy serve api_server m --tp 2", "headstart probe"),
    ("trtllm-build --checkpoint_dir ./c --speculative_decoding_mode medusa", "headstart launch trtllm"),
])  # fmt: skip
def test_programs_without_a_launcher_get_a_hint(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match="has no launcher here") as caught:
        translate_text(text, None, None)
    assert hint in caught.value.hint
