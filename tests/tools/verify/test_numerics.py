"""`verify --numerics`: deviation of a backend from the float32 reference."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import family_of, new_folder, prompt_of, soften, tiny_model
from tiny_models import write_model

from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.errors import UsageError
from headstart.tools.verify import numerics
from headstart.tools.verify.options import VerifyOptions

FAMILY = "mimo"
PROMPTS = ("the thing", tuple(prompt_of(90, 1)), "x")


@pytest.fixture(scope="module")
def folder() -> Path:
    config, arrays = family_of(FAMILY).tiny(num_hidden_layers=2)
    return write_model(new_folder(), config, soften(arrays, 0.3))


def options(folder: Path, **config: Any) -> VerifyOptions:
    settings = EngineConfig(backend="reference", threads=1, kv_blocks=40, **config)
    prompts: Any = tuple(list(each) if isinstance(each, tuple) else each for each in PROMPTS)
    return VerifyOptions(model=str(folder), config=settings, prompts=prompts, max_tokens=20)


def test_float32_has_no_deviation(folder: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    report = numerics.run(options(folder), lambda *call: calls.append(call))
    data = report.data
    assert report.ok and data["texts"] == 3 and data["rows"] > 90 + 3 * 20
    assert data["kl"]["max"] < 1e-9 and data["top1_agreement"] == 1
    assert data["perplexity"]["backend"] == pytest.approx(data["perplexity"]["reference"], rel=1e-6)
    assert data["max_logit_difference"] < 1e-4 and [done for done, _, _ in calls] == list(range(1, 7))
    assert {total for _, total, _ in calls} == {6}


def test_bfloat16_has_a_small_deviation(folder: Path) -> None:
    data = numerics.run(options(folder, dtype="bfloat16")).data
    assert 0 < data["kl"]["median"] <= data["kl"]["mean"] <= data["kl"]["max"] < 0.05
    assert data["kl"]["median"] <= data["kl"]["p99"] <= data["kl"]["max"]
    assert 1e-4 < data["max_logit_difference"] < 0.5
    assert data["perplexity"]["backend"] != data["perplexity"]["reference"] and json.dumps(data, allow_nan=False)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [-1.0, float("nan")])
def test_broken_backend_is_reported(
    folder: Path, damage: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The logits of the float64 model are damaged; those of the reference are not."""
    import torch

    from headstart.kernels.reference.backend import ReferenceBackend

    original = ReferenceBackend.numpy
    monkeypatch.setattr(
        ReferenceBackend,
        "numpy",
        lambda self, x: original(self, x) * np.float32(damage if self.dtype == torch.float64 else 1),
    )
    command = ["verify", str(folder), "--numerics", "--dtype", "float64", "--threads", "1", "--max-tokens", "8"]
    assert main([*command, "--json"]) == 1
    data = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert data["ok"] is False and (data["kl"]["mean"] is None) == np.isnan(damage) and main(command) == 1
    assert "BROKEN" in capsys.readouterr().out


def test_logits_do_not_depend_on_chunks(folder: Path) -> None:
    """A text in chunks and the same text after a longer one have the same logits."""
    scorer = numerics.TeacherForcing(tiny_model(FAMILY), EngineConfig(threads=1, dtype="float64"), 120)
    tokens = prompt_of(120, 3)
    parts = list(scorer.logits(tokens))
    assert [len(part) for part in parts] == [64, 55]
    again = np.concatenate(list(scorer.logits(tokens[:70])))
    np.testing.assert_allclose(np.concatenate(parts)[:69], again, atol=1e-6)


def test_metrics_of_two_known_rows() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], np.float32)) + np.float32(3)
    found = numerics.compare(reference, np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]], np.float32)), [0, 2, 1])
    np.testing.assert_allclose(found.kl, [0.5 * np.log(2) - 0.25 * np.log(2), 0], atol=1e-6)
    assert found.agrees.tolist() == [False, True]
    np.testing.assert_allclose(np.exp(-found.surprise), [0.25, 0.6], atol=1e-6)
    np.testing.assert_allclose(np.exp(-found.reference_surprise), [0.5, 0.6], atol=1e-6)
    np.testing.assert_allclose(found.logit_difference, [3 + np.log(2), 3], atol=1e-5)


def test_missing_torch_is_reported_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else original(name))
    monkeypatch.setattr(numerics, "load_model", lambda *arguments: pytest.fail("work began"))
    with pytest.raises(UsageError, match="needs torch, which is not installed"):
        numerics.run(options(folder))
