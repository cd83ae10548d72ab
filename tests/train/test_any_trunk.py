"""Heads for every family: short training, export, drafting; early refusal of models that cannot be trained for."""

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import support
from tiny_models import write_model

from headstart.config import EngineConfig
from headstart.core import Report, no_progress
from headstart.engine.load import attach_head
from headstart.errors import ModelError, UsageError
from headstart.heads.kind import is_plain, new_head_spec
from headstart.tools.inspect.run import InspectOptions, run as inspect
from headstart.train.dataset import TrainingData
from headstart.train.frozen_model import make_frozen_model
from headstart.train.records import Example
from headstart.train.run import TrainOptions, _TrainingRun, check, run
from headstart.train.self_distillation import with_own_text

QUICK = ("deepseek_v4", "gemma3", "gemma4", "nemotron_h")


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        (name, ("mtp", "eagle3", "block")) if name in QUICK
        else pytest.param(name, ("mtp", reader), marks=pytest.mark.slow)
        for name, reader in zip(support.FAMILIES, cycle(("eagle3", "block")), strict=False)
    ],
)  # fmt: skip
def test_trained_heads_of_each_kind_draft(family: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """EAGLE-3 and block drafters both tap several layers; each slow family is tested with one of them."""
    model, rng = support.tiny_model(family), np.random.default_rng(0)
    engine_config = EngineConfig(backend="reference", dtype="float64", threads=1)
    texts = rng.integers(0, support.VOCAB - 8, (3, 20)).astype(np.int32)
    examples = [Example("text", text, np.ones(20, np.bool_)) for text in texts]
    requests = [support.request(support.prompt_of(9, 1), stops=(), max_tokens=8)]
    plain = support.run(support.make(model, drafter="none"), requests)
    for kind in kinds:
        frozen_model = make_frozen_model(model, engine_config, kind, 2)
        data = TrainingData(examples[1:], examples[:1], frozen_model.trunk, {}, [])
        options = TrainOptions(
            model="m", out=tmp_path / kind, kind=kind, depth=2, tokens=60, draft_vocab=50, measure_speedup=False
        )
        options.work.mkdir()
        assert _TrainingRun(options, frozen_model, data, None, no_progress).train(0.0).data["steps"] > 0
        engine = support.make(replace(model, head=attach_head(model, options.out)), depth=2)
        support.assert_same(support.run(engine, requests), plain)
        assert engine.stats.drafted > 0


def test_every_family_can_have_a_new_head_of_each_kind() -> None:
    for name in support.ALL_FAMILIES:
        family = support.family_of(name)
        for kind in ("mtp", "eagle3", "block"):
            assert is_plain(new_head_spec(kind, family.read(family.tiny_config())).layer), (name, kind)


def test_train_accepts_the_command_of_inspect_and_refuses_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.train.run.load_frozen_model", lambda *_: pytest.fail("the model is loaded"))
    model = write_model(tmp_path / "a model", *support.family_of("gemma3").tiny(num_hidden_layers=2))
    fix = inspect(InspectOptions(model=str(model))).data["heads"]["fix"]
    assert fix == f"make one: headstart train '{model}' --out HEAD --minutes 60"
    options = TrainOptions(model=str(model), out=tmp_path / "head", data=(tmp_path,), tokens=5)
    check(options)
    with pytest.raises(UsageError, match="reads three layers, but the model has 2"):
        run(replace(options, kind="eagle3"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    assert "which this one does not" in inspect(InspectOptions(model=str(model))).data["heads"]["fix"]
    with pytest.raises(ModelError, match="unheard_of"):
        run(options)


def test_too_little_text_is_refused_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = write_model(tmp_path / "model", *support.family_of("llama").tiny()), tmp_path / "text.jsonl"
    text.write_text('{"text": "the sky is blue and the sea is blue and the sky is blue"}\n' * 8)
    options = TrainOptions(model=str(model), out=tmp_path / "head", data=(text,), tokens=5_000, threads=1)
    with pytest.raises(UsageError, match="tokens, but a new head needs 1,000 at the very least") as caught:
        run(options)
    assert "--data" in caught.value.hint and "--prompts" in caught.value.hint
    written = Report(True, {"answer_tokens": 616}, [])
    monkeypatch.setattr("headstart.train.self_distillation.run", lambda *_: written)
    with pytest.raises(UsageError, match="has 616 tokens"):
        with_own_text(replace(options, data=()), no_progress)
