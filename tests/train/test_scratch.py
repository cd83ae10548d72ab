"""`train --from-scratch`: recurrences in chunks, gradients of every family, trained checkpoints, refused options."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch

from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.errors import UsageError
from headstart.kernels.reference.recurrent import Step, conv_step, delta_step, scan_step
from headstart.kernels.specs import ConvSpec, DeltaSpec, ScanSpec
from headstart.train import plain_text, recurrent, scratch
from headstart.train.objective import LossConfig
from headstart.train.records import SkippedRecords
from headstart.train.scratch import ScratchModel, ScratchOptions, run

TINY = {"vocab_size": support.VOCAB, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}
POEM = "the other thing in the tower then hears an aunt or ant out there\n"


def tiny_model(family: str) -> ScratchModel:
    return ScratchModel(family, support.family_of(family), TINY, torch.float64)


def tokens_of(rows: int, length: int) -> Any:
    return torch.from_numpy(np.random.default_rng(0).integers(0, support.VOCAB, (rows, length)))


def run_recurrence(step: Step, rows: Any, state: Any) -> Any:
    """Output of the recurrence, row by row as at run time."""
    outputs = []
    for t in range(rows.shape[1]):
        state, made = step(state, rows[:, t])
        outputs.append(made)
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize(("tiled", "by_channel"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("length", [1, 63, 150])
def test_chunked_gated_delta_equals_the_recurrence(tiled: bool, by_channel: bool, length: int) -> None:
    spec = DeltaSpec(2, 6, 12, 8, tiled, by_channel)
    generator = torch.Generator().manual_seed(length)
    qkv = torch.randn(2, length, spec.channels, dtype=torch.float64, generator=generator)
    decay = -2 * torch.rand(2, length, spec.num_decays, dtype=torch.float64, generator=generator)
    strength = torch.randn(2, length, 6, dtype=torch.float64, generator=generator)
    state = torch.zeros(2, *spec.state_shape, dtype=torch.float64)
    expected = run_recurrence(delta_step(spec), torch.cat((qkv, decay, strength), -1), state)
    torch.testing.assert_close(recurrent.gated_delta(qkv, decay, strength, spec), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("length", [1, 150])
def test_chunked_selective_scan_equals_the_recurrence(length: int) -> None:
    spec, generator = ScanSpec(2, 6, 12, 8), torch.Generator().manual_seed(length)
    xbc = torch.randn(2, length, spec.channels, dtype=torch.float64, generator=generator)
    steps = torch.rand(2, length, 6, dtype=torch.float64, generator=generator)
    rate, skip = -torch.rand(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    state = torch.zeros(2, *spec.state_shape, dtype=torch.float64)
    expected = run_recurrence(scan_step(spec, rate, skip), torch.cat((xbc, steps), -1), state)
    torch.testing.assert_close(recurrent.selective_scan(xbc, steps, rate, skip, spec), expected, rtol=1e-12, atol=1e-13)


def test_causal_conv_equals_the_recurrence() -> None:
    spec, x, weight = ConvSpec(5, 4), torch.randn(2, 9, 5), torch.randn(20)
    expected = run_recurrence(conv_step(weight, spec), x, torch.zeros(2, 3, 5))
    torch.testing.assert_close(recurrent.causal_conv(x, weight, spec), expected)


FIXED = (
    ".q_conv1d.weight", ".k_conv1d.weight", ".v_conv1d.weight", "e_score_correction_bias", ".router_bias",
    ".ffn.gate.bias", ".ffn.gate.tid2eid", ".expert_bias", ".layer_scalar", ".mlp.gate.bias", ".global_scale",
    ".ple.conv1d.weight",
    "layers.0.self_attention_res_norm.weight", "layers.0.self_attention_res_proj.weight",  # attention over a single sum
)  # fmt: skip
INDEXER = (".indexer.", ".index_")


def loss_config(family: str) -> LossConfig:
    """Loss of one draft step for heads whose indexer selects windows."""
    return LossConfig(steps=(1.0,)) if family in ("glm5_next", "qwen4_exp") else LossConfig()


@pytest.mark.slow
@pytest.mark.parametrize("family", support.FAMILIES)
def test_every_tensor_gets_a_gradient(family: str) -> None:
    """Exceptions: router biases, indexers, layer scalars (fixed in transformers too), and the convolutions of Kimi
    delta attention and of memories, which run outside torch."""
    model = tiny_model(family)
    loss, head_loss, _ = model.losses(tokens_of(3, 40), loss_config(family))
    (loss + head_loss).backward()
    without = {name for name, each in model.masters.items() if each.grad is None or not each.grad.abs().sum() > 0}
    assert {name for name in without if not name.endswith(FIXED) and not any(each in name for each in INDEXER)} == set()


SMALL_MAMBA2 = {"mamba_n_heads": 2, "mamba_d_head": 32, "vocab_size": support.VOCAB, "hidden_size": 32}
MAMBA2 = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2, **SMALL_MAMBA2},
    "falcon_h1": {"num_hidden_layers": 1, "mamba_d_ssm": 64, "intermediate_size": 32, **SMALL_MAMBA2},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", MAMBA2)
def test_every_trunk_tensor_of_mamba2_families_gets_a_gradient(family: str) -> None:
    model = ScratchModel(family, support.family_of(family), MAMBA2[family], torch.float64)
    model.losses(tokens_of(3, 40), LossConfig())[0].backward()
    trunk = {name: each for name, each in model.masters.items() if "mtp" not in name and "head." not in name}
    assert not [name for name, each in trunk.items() if each.grad is None or not each.grad.abs().sum() > 0]


@pytest.mark.slow
@pytest.mark.parametrize("family", support.FAMILIES)
def test_gradients_match_finite_differences(family: str) -> None:
    """A small step along the gradient lowers the trunk's loss by the predicted amount."""
    model = tiny_model(family)
    for each in model.masters.values():
        each.data = each.data.double()
    tokens, step = tokens_of(2, 12), 1e-6
    loss, _, _ = model.losses(tokens, loss_config(family))
    loss.backward()
    slopes = {name: each.grad for name, each in model.masters.items() if each.grad is not None}
    size = sum(float(slope.square().sum()) for slope in slopes.values())
    with torch.no_grad():
        for name, slope in slopes.items():
            model.masters[name] -= step / size * slope
    below, _, _ = model.losses(tokens, loss_config(family))
    assert (loss - below).item() / step == pytest.approx(1, rel=1e-3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    (folder / "poem.txt").write_text(POEM * 600)
    options = ScratchOptions(
        from_scratch="qwen3_5", out=folder / "model", data=(folder / "poem.txt",), tokens=7_000, threads=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "BATCH_ROWS", 2)
        patch.setattr(scratch, "BATCH_LENGTH", 64)
        run(options)
    return options.out


@pytest.mark.slow
def test_trained_model_learns_the_text_and_its_head_drafts(trained: Path) -> None:
    assert json.loads((trained / "training.json").read_text())["held_out_loss"] < 0.5
    llm = LLM(str(trained), EngineConfig(depth=3))
    (found,) = llm.generate(["the other thing"], SamplingParams(max_tokens=40))
    assert found.text.startswith(" in the tower then") and llm.method == "mtp"
    assert found.speculation.acceptance_length > 2


def test_documents_of_files_folders_and_records_are_read(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a.py").write_text("x = 1\n" * 60)
    pair = {"prompt": "What?", "response": "That."}
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, [{"text": "some text"}, pair, {"no": 1}])))
    skipped = SkippedRecords()
    found = plain_text.read_documents((tmp_path / "tree", tmp_path / "b.jsonl"), skipped)
    assert [record.text for record in found] == ["x = 1\n" * 60, "some text", "What?\n\nThat."] and skipped.count == 1
    assert sum(len(record.text) for record in plain_text.read_documents((), skipped)) > 1_000_000


def test_batches_contain_every_document_once_per_epoch() -> None:
    found = scratch.token_batches([np.full(50, number, np.int32) for number in range(8)], 2, 25, 0)
    rounds = [[next(found) for _ in range(8)] for _ in range(2)]
    for each in rounds:
        assert np.bincount(np.concatenate(each).reshape(-1)).tolist() == [50] * 8
    assert not np.array_equal(rounds[0], rounds[1])


@pytest.mark.parametrize(("changes", "message"), [
    ({"from_scratch": "animal"}, "no family 'animal'"),
    ({"tokens": 0}, "above 0"),
    ({"data": (Path("nowhere"),)}, "nowhere does not exist"),
    ({"out": Path()}, "exists"),
])  # fmt: skip
def test_impossible_options_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    options = {"from_scratch": "mimo", "out": tmp_path / "model", "tokens": 100, **changes}
    with pytest.raises(UsageError, match=message):
        run(ScratchOptions(**options))


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text(POEM * 10)
    with pytest.raises(UsageError, match="too few to learn from"):
        run(ScratchOptions(from_scratch="mimo", out=tmp_path / "model", tokens=100, data=(tmp_path / "poem.txt",)))


@pytest.mark.parametrize(("words", "message"), [
    (["--kind", "eagle3"], "--kind does not go with --from-scratch"),
    (["--finetune"], "--finetune does not go"),
    (["--draft-vocab", "100"], "--draft-vocab does not go"),
    (["--restart"], "--restart does not go"),
    (["some/model"], "some/model does not go"),
])  # fmt: skip
def test_head_options_are_refused_from_scratch(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words, "--from-scratch", "mimo", "--out", str(tmp_path / "model"), "--tokens", "1000"]) == 2
    assert message in capsys.readouterr().err
