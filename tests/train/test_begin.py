"""Fine-tuning of a head keeps its LM head, draft vocabulary and taps."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support

from headstart.config import EngineConfig
from headstart.engine.load import load_model
from headstart.heads.files import read_head, write_head
from headstart.layers.build import raw_lm_head
from headstart.train import run as run_module
from headstart.train.evaluate import Acceptance
from headstart.train.frozen_model import make_frozen_model
from headstart.train.head_weights import initial_head
from headstart.train.run import TrainOptions, run
from headstart.train.trainer import Trainer, TrainingHooks

WORDS = ["the", "other", "thin", "thing", "in", "tower", "then", "hears", "an", "aunt", "or", "ant", "out", "there"]


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("common")
    config, arrays = support.family_of("llama").tiny(num_hidden_layers=7)
    model, texts = support.write_model(folder / "model", config, support.soften(arrays, 0.1)), folder / "t.jsonl"
    rows = np.random.default_rng(1).choice(WORDS, (40, 40))
    texts.write_text("".join(json.dumps({"kind": "plain", "text": " ".join(row)}) + "\n" for row in rows))
    options = {"model": str(model), "data": (texts,), "threads": 1, "measure_speedup": False, "kind": "eagle3"}
    run(TrainOptions(out=folder / "head", tokens=15_000, draft_vocab=15, **options))
    return {**options, "head": folder / "head"}


def write_changed_head(common: dict[str, Any], path: Path, tensors: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A copy of the head with other tensors and config keys."""
    head = read_head(common["head"])
    write_head(path, head, {**{name: tensor.float32() for name, tensor in head.tensors.items()}, **(tensors or {})})
    (path / "config.json").write_text(json.dumps({**json.loads((path / "config.json").read_text()), **keys}))
    return path


def acceptance_lengths(out: Path) -> list[float]:
    """Held-out acceptance length of each evaluation."""
    lines = (out.with_name(out.name + ".training") / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["held_out"]["all"]["length"] for line in lines]


@pytest.mark.slow
def test_own_lm_head_is_kept(common: dict[str, Any], tmp_path: Path) -> None:
    """A head with negated norm and LM head drafts as before. With the trunk's LM head it would not."""
    tensors = {name: each.float32() for name, each in read_head(common["head"]).tensors.items()}
    model = load_model(common["model"], EngineConfig(backend="reference", dtype="float32", threads=1))
    rows = raw_lm_head(model.weights, model.config).take_rows(read_head(common["head"]).draft_token_ids).float32()
    path = write_changed_head(
        common, tmp_path / "turned", {"norm.weight": -tensors["norm.weight"], "lm_head.weight": -rows}
    )
    out = tmp_path / "out"
    run(TrainOptions(out=out, tokens=300, draft_vocab=100, finetune=True, **{**common, "head": path}))
    assert acceptance_lengths(out)[0] > 1.25 and acceptance_lengths(out)[0] == pytest.approx(
        acceptance_lengths(common["head"])[-1], abs=0.05
    )
    before, after = read_head(path), read_head(out)
    rows_of = [each.tensors["lm_head.weight"].float32() for each in (after, before)]
    np.testing.assert_allclose(*rows_of, rtol=2**-8)  # written in bfloat16
    assert np.array_equal(after.draft_token_ids, before.draft_token_ids), "the LM head's rows have other token ids"


@pytest.mark.slow
def test_draft_vocabulary_grows_with_lm_head_rows_of_the_trunk(common: dict[str, Any], tmp_path: Path) -> None:
    run(TrainOptions(out=tmp_path / "out", tokens=300, draft_vocab=100, finetune=True, **common))
    ids, known = (read_head(path).draft_token_ids for path in (tmp_path / "out", common["head"]))
    assert {*known.tolist()} < {*ids.tolist()}


@pytest.mark.slow
def test_other_text_keeps_the_draft_vocabulary(common: dict[str, Any], tmp_path: Path) -> None:
    known = read_head(common["head"]).draft_token_ids
    texts = tmp_path / "t.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} Zebras quickly jump {n * n}"}) + "\n" for n in range(300)))
    options = {**common, "data": (texts,), "draft_vocab": len(known)}
    run(TrainOptions(out=tmp_path / "same", tokens=300, finetune=True, **options))
    assert np.array_equal(read_head(tmp_path / "same").draft_token_ids, known)


@pytest.mark.slow
def test_taps_of_the_head_are_kept(common: dict[str, Any], tmp_path: Path) -> None:
    path = write_changed_head(common, tmp_path / "other", tap=[1, 4, 5])
    run(TrainOptions(out=tmp_path / "out", tokens=300, finetune=True, **{**common, "head": path}))
    assert read_head(tmp_path / "out").spec.tap == (1, 4, 5)
    assert [each.name[-6:] for each in (tmp_path / "out.training").glob("cache-*")] == ["-1-4-5"]
    unnamed = write_changed_head(common, tmp_path / "unnamed", tap=[])
    model = load_model(common["model"], EngineConfig(backend="reference", dtype="float32", threads=1))
    frozen_model = make_frozen_model(model, EngineConfig(backend="reference", dtype="float32", threads=1), "eagle3")
    assert initial_head(frozen_model, read_head(unnamed)).spec.tap == (2, 3, 4), "the paper's"


@pytest.mark.slow
def test_no_run_ends_early_in_the_first_half_of_its_schedule(
    common: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every evaluation has a lower acceptance length than the one before."""
    tried = itertools.count(100)
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: {"all": Acceptance((100,), next(tried), (100.0,))})
    monkeypatch.setattr(run_module, "PATIENCE", 2)
    monkeypatch.setattr(run_module, "TrainingHooks", partial(TrainingHooks, evaluation_seconds=0.0))
    run(TrainOptions(out=tmp_path / "out", tokens=6_000, finetune=True, **common))
    log = (tmp_path / "out.training" / "log.jsonl").read_text().splitlines()
    tokens = [json.loads(line)["tokens"] for line in log]
    assert tokens[-3] > 3_000 >= tokens[-4] and tokens[-1] < 6_000
