"""Block drafters exported to other engines' layouts and read back draft the same tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support

from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.load import load_model
from headstart.heads.files import read_head
from headstart.heads.kind import head_kind
from headstart.layers.rope import rope_spec
from headstart.models.small import random_arrays
from headstart.tools.export.run import ExportOptions, run as export
from headstart.train.run import TrainOptions, run as train

WORDS = ["the", "other", "thin", "thing", "in", "tower", "then", "hears", "an", "aunt", "or", "ant", "out", "there"]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip


def trunk(folder: Path, family: str = "llama", **changes: Any) -> str:
    config, arrays = support.family_of(family).tiny(num_hidden_layers=5, **changes)
    return str(support.write_model(folder, config, support.soften(arrays, 0.1)))


def draft_results(model: str, head: Path) -> list[Any]:
    """(token ids, drafts, accepted) of each answer."""
    common: dict[str, Any] = {"backend": "reference", "dtype": "float64", "threads": 1, "max_model_len": 128}
    llm = LLM(model, EngineConfig(head=str(head), depth=4, **common))
    assert llm.method == "block"
    questions = ["the other thing", "an ant out there", "then hears in the tower", "or the aunt"]
    answers = llm.generate(questions, SamplingParams(max_tokens=40, ignore_eos=True))
    return [(each.token_ids, each.speculation.drafts, each.speculation.accepted) for each in answers]


@pytest.mark.slow
def test_trained_block_drafter_round_trips_through_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, head, prompts = trunk(tmp_path / "model"), tmp_path / "head", tmp_path / "prompts.jsonl"
    asked = np.random.default_rng(2).choice(WORDS, (40, 3))
    prompts.write_text("".join(json.dumps({"prompt": " ".join(words)}) + "\n" for words in asked))
    common: dict[str, Any] = {"kind": "block", "model": model, "threads": 1, "measure_speedup": False}
    train(TrainOptions(out=head, prompts=(prompts,), tokens=6_000, draft_vocab=100, **common))
    before = draft_results(model, head)
    assert sum(accepted for *_, accepted in before) > 20
    for layout in ("vllm-dspark", "speculators"):
        out = tmp_path / layout
        assert export(ExportOptions(model=model, head=head, to=layout, out=out)).ok
        assert len(read_head(out).draft_token_ids) == 100 and draft_results(model, out) == before
        assert main(["inspect", str(out)]) == 0 and "DSpark: ALIVE" in capsys.readouterr().out
    again = tmp_path / "again"
    train(TrainOptions(out=again, finetune=True, head=out, prompts=(prompts,), tokens=300, **common))
    last = json.loads((tmp_path / "head.training" / "log.jsonl").read_text().splitlines()[-1])
    standing = json.loads((tmp_path / "again.training" / "log.jsonl").read_text().splitlines()[0])
    assert standing["held_out"]["all"]["length"] == pytest.approx(
        last["held_out"]["all"]["length"], abs=0.2
    )  # 12 held-out tokens, and the file rounds to bfloat16: two of them may flip
    assert "embed_tokens.weight" in read_head(again).tensors
    assert main(["export", model, "--head", str(head), "--to", "vllm-dflash", "-o", str(tmp_path / "no")]) == 2
    assert "DFlash has no Markov or confidence head" in (told := capsys.readouterr().err)
    assert "--to vllm-dspark" in told


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_new_block_drafters_fit_published_layouts(tmp_path: Path, family: str) -> None:
    """The trunk's block may have biases and a scaled RoPE."""
    model = trunk(tmp_path / "model", family, rope_parameters=LLAMA3)
    kind, config = head_kind("block"), load_model(model, EngineConfig(backend="reference", threads=1)).config
    spec = replace(kind.training.spec(5, 4), layer=kind.training.layer(config.head_layer, config.hidden_size))
    assert spec.layer.mixer.rope == rope_spec({"rope_theta": 500000.0}, config.head_layer.mixer.spec.head_dim)
    sizes = {"vocab_size": config.vocab_size, "draft_vocab_size": config.vocab_size}
    spec = replace(spec, block=replace(spec.block, **sizes))
    head = support.write_head(tmp_path / "head", config, spec, random_arrays(kind.shapes(spec, config.hidden_size), 5))
    for layout in ("vllm-dspark", "speculators"):
        out = tmp_path / layout
        assert export(ExportOptions(model=model, head=head, to=layout, out=out)).ok
        again = read_head(out).spec
        assert (again.layer, again.tap) == (spec.layer, spec.tap)
        assert replace(again.block, causal=True, causal_windows=False, windows=(), mask_embedding=True) == spec.block
        assert again.block.all_causal


def test_block_drafters_of_older_versions_are_refused_with_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, head = trunk(tmp_path / "model"), tmp_path / "head"
    kind, config = head_kind("block"), load_model(model, EngineConfig(backend="reference", threads=1)).config
    spec = replace(kind.training.spec(5, 4), layer=config.head_layer)
    support.write_head(head, config, spec, random_arrays(kind.shapes(spec, config.hidden_size), 5))
    assert main(["export", model, "--head", str(head), "--to", "vllm-dspark", "-o", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "q and k are not normed" in told and "train a new one: headstart train --kind block" in told
