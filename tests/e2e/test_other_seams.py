"""Plug-in examples of docs/extend: head kind, checkpoint format, launcher, tool format, reasoning format."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from seams import TUTORIALS, plugged_in
from tiny_models import write_model

from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.heads.base import HeadSpec
from headstart.heads.files import read_head
from headstart.models.small import Arrays, random_arrays
from headstart.text.parsers import (
    Arguments,
    Content,
    Reasoning,
    ToolCall,
    format_in,
    is_opened,
    make_parser,
    merge_events,
)

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def plug_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with plugged_in(tmp_path_factory.mktemp("plug_ins"), *TUTORIALS):
        yield


def llama(folder: Path, softness: float = 1.0) -> Path:
    config, arrays = support.family_of("llama").tiny(num_hidden_layers=2)
    return write_model(folder / "model", config, support.soften(arrays, softness))


def answers(model: Path, **settings: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM(str(model), EngineConfig(**{"threads": 1, "kv_blocks": 40, "max_model_len": 128, **settings}))
    return [done.token_ids for done in llm.generate(["the thing", "x x x"], PARAMS)], llm


def shift_head(path: Path, model: Path) -> Path:
    config = support.family_of("llama").parse(json.loads((model / "config.json").read_text()))
    arrays = random_arrays({"shift.weight": (config.hidden_size, config.hidden_size)}, 3)
    return support.write_head(path, config, HeadSpec(kind="shift"), arrays)


def test_head_of_a_new_kind_drafts(tmp_path: Path) -> None:
    model = llama(tmp_path)
    head = shift_head(tmp_path / "head", model)
    expected, _ = answers(model, drafter="none")
    for depth in (3, "auto"):
        drafted, llm = answers(model, head=str(head), depth=depth)
        assert drafted == expected
        assert llm.method == "shift"
        assert llm.engine.stats.drafted or depth == "auto"


@pytest.mark.slow
def test_head_of_a_new_kind_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the softened trunk the last token mostly determines the next, so that the head's matrix can learn."""
    model, text, out = llama(tmp_path, 0.1), tmp_path / "t.jsonl", tmp_path / "head"
    words = np.random.default_rng(2).choice(["the", "other", "thing", "in", "an"], (40, 30))
    text.write_text("".join(json.dumps({"text": " ".join(row)}) + "\n" for row in words))
    flags = ["--kind", "shift", "--tokens", "6000", "--depth", "2", "--threads", "1", "--draft-vocab", "100"]
    assert main(["train", str(model), "--data", str(text), "--out", str(out), *flags]) == 0, capsys.readouterr().err
    head = read_head(out)
    assert (head.spec.kind, list(head.tensors)) == ("shift", ["shift.weight"])
    assert head.tensors["shift.weight"].float32().any()
    assert answers(model, head=str(out), depth=2)[0] == answers(model, drafter="none")[0]


@pytest.mark.slow
def test_new_checkpoint_format_is_loaded_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal weights in the new format give equal text."""
    config, arrays = support.family_of("mimo").tiny()
    plain = write_model(tmp_path / "plain", config, arrays)
    packed = write_model(tmp_path / "packed", config, Arrays())
    (packed / "model.safetensors").unlink()
    np.savez(packed / "weights.npz", **arrays)
    assert answers(packed, depth=2)[0] == answers(plain, depth=2)[0]
    assert main(["inspect", str(packed), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["heads"]["verdict"]) == ("npz", "alive")


@pytest.mark.parametrize(("version", "flag"), [("2.1", "--draft-depth"), ("1.9", "--speculate")])
def test_new_launcher(version: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model", *support.family_of("mimo").tiny())
    words = ["launch", "acme-serve", str(model), "--dry-run", "--engine-version", version, "--depth", "2"]
    assert main([*words, "--gpus", "h100x1"]) == 0
    assert f"acme-serve --model {model} --host 127.0.0.1 --port 8000 {flag} 2" in capsys.readouterr().out
    assert main([*words, "--role", "prefill"]) == 2
    assert "Acme does not support --role" in capsys.readouterr().err
    assert main(["launch", "--translate", "acme-serve --model m --speculate 3"]) == 0
    assert "acme-serve --model m --draft-depth 3" in capsys.readouterr().out


def events(text: str, tools: str | None, reasoning: str | None = None) -> list[Any]:
    """Events of `text`, checked to be equal for every split."""
    seen = []
    for cut in range(len(text)):
        parser = make_parser(tools, [], reasoning)
        seen.append(merge_events([*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()]))
    assert all(each == seen[0] for each in seen)
    return seen[0]


def test_new_tool_format() -> None:
    text = 'So:\n<call get_weather {"city": "Oslo"}> and <call now'
    expected = [Content("So:"), ToolCall(0, "get_weather"), Arguments(0, '{"city": "Oslo"}')]
    assert events(text, "angle")[:3] == expected
    assert events('<call get_weather {"city": "Oslo"}>', "angle") == expected[1:]
    assert events("<call >no", "angle") == [Content("<call >no")]
    assert format_in("{{ '<call ' + name }}", "tool_formats") == "angle"


def test_new_reasoning_format() -> None:
    text = '[notes]\nCold there?\n[/notes]\n\n<call get_weather {"city": "Oslo"}>'
    call = [ToolCall(0, "get_weather"), Arguments(0, '{"city": "Oslo"}')]
    assert events(text, "angle", "notes") == [Reasoning("Cold there?"), *call]
    assert format_in("{{ '[notes]' }}", "reasoning_formats") == "notes"
    assert is_opened("notes", "<|im_start|>assistant\n[notes]\n")
    assert not is_opened("notes", "<think>\n")
