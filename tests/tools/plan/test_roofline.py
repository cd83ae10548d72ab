"""The roofline model of `headstart plan`: shapes, passes, depths, memory, cost, calibration."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import write_tiny

from headstart import noise
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.errors import ModelError, UsageError
from headstart.formats import open_checkpoint
from headstart.layers.costs import FeedForwardCost
from headstart.tools.bench.summary import cost_per_million
from headstart.tools.plan import drafters as acceptance, measure, run as plan
from headstart.tools.plan.machine import DeviceSpec, Machine, Rates, find_device, make_machine, parse_gpu
from headstart.tools.plan.roofline import (
    Pass,
    break_even,
    draft_seconds,
    fastest,
    first_token_seconds,
    pass_costs,
    pass_seconds,
    step_speed,
)
from headstart.tools.plan.shape import SizedModel
from headstart.tools.plan.sources import CARD_NAMES, CARDS, find_shape, from_checkpoint, shape_of

Capture = pytest.CaptureFixture[str]
SHARP = Rates(bandwidth=1e12, compute=1e14, attention=1e14)
"""A machine without fixed costs: only bytes and operations count."""


def model(name: str, weights: str | None = None, kv: float = 2) -> SizedModel:
    shape = find_shape(name, weights)
    return SizedModel(shape=shape, kv=kv)


def ideal_machine(count: int = 1, tp: int | None = None, ep: int = 1, rates: Rates = SHARP) -> Machine:
    device = DeviceSpec(
        name="sharp", memory=1e12, bandwidth=1e12, tflops={"bf16": 100}, kind="gpu", source="", link=1e11, link_s=1e-5
    )
    return Machine(device=device, rates=rates, count=count, tp=tp or count, ep=ep)


# Shapes


@pytest.mark.parametrize(("card", "total", "active"), [
    ("deepseek-v3", 671, 37), ("deepseek-v4", 284, 13), ("deepseek-v4-pro", 1600, 49), ("glm-5.1", 744, 40),
    ("glm-4.5", 355, 32), ("qwen3.5-397b-a17b", 397, 17), ("qwen3-30b-a3b", 30.5, 3.3),
    ("gpt-oss-120b", 117, 5.1), ("step-3.5-flash", 196, 11), ("llama-2-7b", 6.74, 6.6), ("hy3", 295, 21),
    ("deepseek-v3.2", 671, 37), ("qwen3-235b-a22b", 235, 22), ("gemma-4-31b", 30.7, 30.7),
    ("gemma-4-26b-a4b", 25.2, 3.8), ("llama-4-maverick", 400, 17), ("granite-4.0-h-small", 32.2, 9),
    ("nemotron-3-nano", 31.6, 3.2), ("nemotron-3-super", 120, 12), ("mimo-v2-flash", 309, 15),
    ("k-exaone-236b-a23b", 236, 23), ("ling-1t", 1000, 50), ("falcon-h1-34b", 33.6, 33.6),
    ("llama-4-scout", 107.8, 17),  # 109 with the vision tower
])  # fmt: skip
def test_parameters_of_cards_match_the_published_counts(card: str, total: float, active: float) -> None:
    """In billions. Published figures are rounded; some include the embedding."""
    shape = find_shape(card)
    counts = shape.parameters()
    assert sum(counts.values()) - counts["head"] == pytest.approx(total * 1e9, rel=0.02)
    assert shape.active_parameters() == pytest.approx(active * 1e9, rel=0.12)


def test_mtp_head_of_a_card_has_its_published_size() -> None:
    assert find_shape("qwen3.6-27b").parameters()["head"] * 2 == pytest.approx(811e6 + 40e6, rel=0.05)
    assert model("qwen3.6-27b", "int4").weight_bytes()["head"] == model("qwen3.6-27b").weight_bytes()["head"]


@pytest.mark.parametrize(
    ("card", "per_position"), [("deepseek-v3", 61 * 576), ("qwen3.6-27b", 16 * 2048), ("qwen3-30b-a3b", 48 * 1024)]
)
def test_cached_elements_per_position_depend_on_layer_kinds(card: str, per_position: int) -> None:
    layers = find_shape(card).layers
    kept = [sum(group.count * group.cost.mixer.cached(context) for group in layers) for context in (1000, 1001)]
    assert kept[1] - kept[0] == per_position


def test_windows_sparse_attention_and_experts_limit_reads_of_a_row() -> None:
    sliding = next(g.cost.mixer for g in find_shape("gpt-oss-120b").layers if g.cost.mixer.window)
    chosen = find_shape("glm-5.1").layers[0].cost.mixer
    assert sliding.read(100_000, 1) == sliding.read(128, 1) == 128 * sliding.kv_width
    assert chosen.entries(100_000) == 2048
    assert chosen.read(100_000, 1) == 2048 * 576 + 100_000 * 128  # the indexer reads every position
    coarse = next(g.cost.mixer for g in find_shape("deepseek-v4").layers if g.cost.mixer.stride == 128)
    assert coarse.entries(128_000) == 128 + 1000
    mlp = FeedForwardCost(weights=0, num_kernels=0, experts=64, active=4, expert_weights=1)
    assert mlp.touched(1) == pytest.approx(4) and mlp.touched(2) == pytest.approx(4 + 4 * 60 / 64)
    assert mlp.touched(10_000) == pytest.approx(64)


def test_missing_size_is_named() -> None:
    with pytest.raises(ModelError, match="num_attention_heads is missing"):
        shape_of("made up", {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8})


# Passes


def test_pass_time_is_bandwidth_bound_for_one_row_and_compute_bound_for_many() -> None:
    dense = model("llama-2-7b")
    counts = dense.shape.parameters()
    weights, cache = 2 * (counts["attention"] + counts["mlp"] + counts["lm_head"]), 2 * 32 * 8192 * 500
    assert pass_seconds(dense, ideal_machine(), Pass(1, 1, 500)) == pytest.approx((weights + cache) / 1e12)
    assert pass_seconds(dense, ideal_machine(), Pass(1, 4096, 0)) == pytest.approx(4096 * weights / 1e14)


def part_bytes(name: str, machine: Machine, work: Pass) -> dict[str, float]:
    return {cost.name: cost.bytes for cost in pass_costs(model(name), machine, work)}


def test_rows_of_one_sequence_share_kv_reads() -> None:
    together, apart = (part_bytes("llama-2-7b", ideal_machine(), work) for work in (Pass(1, 8, 4096), Pass(8, 1, 4096)))
    assert (apart["cache"], apart["mlp"]) == (8 * together["cache"], together["mlp"])


def test_tensor_parallel_divides_bytes_and_adds_all_reduces() -> None:
    one, four = (pass_costs(model("llama-2-7b"), ideal_machine(count), Pass(1, 1, 0)) for count in (1, 4))
    by_name = {cost.name: cost.seconds for cost in four}
    assert by_name["mlp"] == pytest.approx({cost.name: cost.seconds for cost in one}["mlp"] / 4)
    latency, num_bytes = 65 * 1e-5, 65 * 2 * 3 / 4 * 4096 * 2
    assert by_name["all-reduce"] == pytest.approx(latency + num_bytes / 1e11)


def test_latent_cache_is_not_divided_among_devices() -> None:
    one, four = (part_bytes("deepseek-v3", ideal_machine(count), Pass(1, 1, 1000)) for count in (1, 4))
    assert one["cache"] == four["cache"]


def test_expert_parallel_waits_for_the_busiest_device() -> None:
    even, spread = (part_bytes("deepseek-v3", ideal_machine(8, ep=ep), Pass(8, 1, 0)) for ep in (1, 8))
    assert even["experts"] < spread["experts"] < 8 * even["experts"] and "all-to-all" in spread


def test_fixed_costs_of_kernels_and_passes_are_added() -> None:
    slow = replace(SHARP, kernel_s=1e-3, pass_s=1.0)
    quick, fixed = (
        pass_seconds(model("llama-2-7b"), ideal_machine(rates=rates), Pass(1, 1, 0)) for rates in (SHARP, slow)
    )
    assert fixed - quick == pytest.approx(1.0 + 1e-3 * (3 + 32 * (7 + 4)))


def test_draft_step_reads_the_head_and_the_lm_head() -> None:
    dense = model("qwen3.6-27b")
    num_bytes = 2 * (dense.shape.parameters()["head"] + dense.shape.vocab_size * dense.shape.hidden_size)
    assert draft_seconds(dense, ideal_machine(), 1, 0) == pytest.approx(num_bytes / 1e12)


# Depths, memory, cost


def test_expected_tokens_and_acceptances_are_inverse() -> None:
    assert acceptance.expected_tokens((0.5,), 3) == 1.875
    assert acceptance.expected_tokens((0.9, 0.5), 2) == pytest.approx(2.35)
    assert acceptance.expected_tokens((0.9,), 0) == 1
    lengths = (1.8, 2.4, 2.7)
    found = acceptance.acceptances_of_lengths(lengths)
    assert [acceptance.expected_tokens(found, depth) for depth in (1, 2, 3)] == pytest.approx(lengths)
    found, _ = acceptance.parse_acceptances("2.5", (2,))
    assert acceptance.expected_tokens(found, 2) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("text", "message"), [("a", "not numbers"), ("4.5", "depth 3 gives 1 to 4"), ("-1", "0 and 1")]
)
def test_impossible_acceptances_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        acceptance.parse_acceptances(text, ())


def test_best_depth_grows_with_acceptance_and_falls_with_batch_size() -> None:
    dense = model("llama-2-7b")

    def best(share: float, batch: int) -> int:
        return fastest([step_speed(dense, ideal_machine(), batch, 100, depth, (share,)) for depth in range(9)]).depth

    assert (best(0.0, 1), best(1.0, 1)) == (0, 8) and best(0.7, 1) > best(0.7, 32) > best(0.7, 256) == 0


def test_time_to_first_token_and_cost_per_million() -> None:
    dense, machine = model("llama-2-7b"), make_machine("4090", 1, "bf16")
    assert 1.9 < first_token_seconds(dense, machine, 8000) / first_token_seconds(dense, machine, 4000) < 2.5
    assert cost_per_million(3.31, 1700) == pytest.approx(0.54, abs=0.001)
    assert cost_per_million(3.31, break_even(3.31, 0.27)) == pytest.approx(0.27)


# Machines


def test_machine_names_are_parsed() -> None:
    names = {"h200x4": ("h200", 4), "H200": ("h200", 1), "mi300x": ("mi300x", 1), "mi300xx8": ("mi300x", 8),
             "7900xtxx2": ("7900xtx", 2), "here": ("here", 1)}  # fmt: skip
    assert {text: parse_gpu(text) for text in names} == names


@pytest.mark.parametrize(
    ("name", "count", "division", "message"),
    [("h2000", 1, {}, "catalogue"), ("h200", 4, {"tp": 3}, "divide"), ("h200", 4, {"ep": 2}, "all 4"),
     ("m5-max", 2, {}, "interconnect")],
)  # fmt: skip
def test_impossible_machines_are_refused(name: str, count: int, division: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_machine(name, count, "bf16", **division)


def test_devices_and_cards_name_their_sources() -> None:
    assert all(find_device(name).source for name in ("h200", "b200", "h100", "a100-80g", "a6000", "rtx-6000-ada"))
    assert all(find_device(name).source for name in ("3090", "4080", "4090", "5090", "7900xtx", "mi300x", "3060"))
    assert all(CARDS[name]["source"] for name in CARD_NAMES)


# Calibration


TRUE = Rates(bandwidth=31e9, compute=5e11, attention=9e10, overlap=4.0, pass_s=2e-4)


@pytest.fixture
def small() -> SizedModel:
    config = {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    }  # fmt: skip
    return SizedModel(shape=shape_of("small", config, weights="q4_1"), kv=2)


def measured(small: SizedModel, *works: Pass) -> list[tuple[Pass, float]]:
    return [(work, pass_seconds(small, ideal_machine(rates=TRUE), work)) for work in works]


def max_error(small: SizedModel, rates: Rates, *works: Pass) -> float:
    pairs = [[pass_seconds(small, ideal_machine(rates=each), work) for each in (rates, TRUE)] for work in works]
    return max(abs(fitted / true - 1) for fitted, true in pairs)


def test_two_passes_predict_other_row_counts(small: SizedModel) -> None:
    rates = measure.fit_rates(measured(small, Pass(1, 1, 128), Pass(1, 8, 128)), small, ideal_machine(), 36e9)
    assert max_error(small, rates, *(Pass(1, rows, 128) for rows in (1, 2, 3, 4, 6, 8, 16, 32, 64))) < 0.1


def test_passes_at_two_contexts_predict_other_batches_and_contexts(small: SizedModel) -> None:
    works = [Pass(batch, 1, context) for batch in (1, 8) for context in (128, 1024)]
    rates = measure.fit_rates(measured(small, *works, Pass(1, 8, 1024)), small, ideal_machine(), 36e9)
    others = [Pass(batch, 1, context) for batch in (2, 16, 64) for context in (128, 1024, 4096)]
    assert max_error(small, rates, *others, *(Pass(1, rows, 4096) for rows in (4, 64))) < 0.05


def test_fitting_needs_two_passes(small: SizedModel) -> None:
    with pytest.raises(ValueError, match="two"):
        measure.fit_rates(measured(small, Pass(1, 1, 128)), small, ideal_machine(), 36e9)
    assert measure.fit_line((1, 3.0), (8, 10.0)) == (2.0, 1.0)
    assert measure.fit_line((1, 3.0), (8, 1.0)) == (3.0, 0.0)  # noise: the cost of a row is at least 0


@pytest.fixture
def tiny_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("headstart.kernels.native._native")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("headstart.tools.pass_timing.MAX_READ_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "PASSES_BUDGET_S", 0.1)
    monkeypatch.setattr(noise, "MAX_WAITING", 1e9)  # other programs may run beside the tests
    return str(write_tiny("mimo", tmp_path / "model"))


@pytest.mark.slow
def test_calibration_of_this_machine_is_cached(tiny_here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan.run(plan.PlanOptions(model=tiny_here, context=100)).data
    assert first["machine"]["name"] == "here" and first["machine"]["rates"]["measured_draft"] is not None
    monkeypatch.setattr(measure, "load_model", lambda *args: pytest.fail("measured again"))
    assert plan.run(plan.PlanOptions(model=tiny_here, context=100)).data == first
    measure.cache_path(tiny_here, EngineConfig()).write_text("damaged")
    with pytest.raises(pytest.fail.Exception):
        plan.run(plan.PlanOptions(model=tiny_here, context=100))
    with pytest.raises(UsageError, match="context is 512"):
        plan.run(plan.PlanOptions(model=tiny_here, context=513))


@pytest.mark.slow
def test_disturbed_calibration_is_reported_and_not_cached(tiny_here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for disturbed, most in ((True, -1.0), (False, 1e9)):
        monkeypatch.setattr(noise, "MAX_WAITING", most)
        assumptions = plan.run(plan.PlanOptions(model=tiny_here)).data["assumptions"]
        assert any("other programs used the processor" in each for each in assumptions) is disturbed
        assert measure.cache_path(tiny_here, EngineConfig()).exists() is not disturbed


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "deepseek_v4", "gemma4", "nemotron_h", "qwen3_5_moe"])
def test_families_can_be_calibrated_on_this_machine(family: str, tiny_here: str, tmp_path: Path) -> None:
    own = str(write_tiny(family, tmp_path / family))
    assert plan.run(plan.PlanOptions(model=own, batches=(1,))).data["batches"][0]["plain"]["tokens_per_s"] > 0


# Checkpoints


def test_checkpoint_size_is_its_tensor_bytes_and_unknown_layers_are_noted(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny("qwen3", tmp_path / "model"))
    found = SizedModel(shape=from_checkpoint(checkpoint, "tiny"), kv=2).weight_bytes()
    whole = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert sum(found.values()) - found["head"] == pytest.approx(whole)
    checkpoint.tensors["blk.0.ssm_out.weight"] = checkpoint.tensors["lm_head.weight"]
    assert any("recurrent" in note for note in from_checkpoint(checkpoint, "tiny").notes)


def test_config_without_weights_can_be_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CARDS["glm-4.5"]["config"]))
    assert find_shape(str(tmp_path)).parameters() == find_shape("glm-4.5").parameters()


# The command


def test_command_prints_json(capsys: Capture) -> None:
    arguments = "plan deepseek-v4 --gpu h200x4 --batch 1,32 --price-per-hour 3.31 --api-price 0.9 --json"
    assert main(arguments.split()) == 0
    data = json.loads(capsys.readouterr().out)
    one, many = data["batches"]
    assert one["plain"]["step_ms"] < many["plain"]["step_ms"] and one["drafting"][0]["depth"] == one["best_depth"] > 0
    each_second = 4 * 3.31 / 3600 * 1e6
    assert many["plain"]["dollars_per_million"] == pytest.approx(each_second / many["plain"]["tokens_per_s"])
    assert data["break_even"][0]["tokens_per_s"] == pytest.approx(each_second / 0.9)
    assert any("GB/s" in text for text in data["assumptions"])


def test_text_output_names_the_price_option_and_missing_memory(capsys: Capture) -> None:
    assert main(["plan", "qwen3.6-27b", "--gpu", "4090", "--weights", "int4", "--depth", "1,3"]) == 0
    shown = capsys.readouterr().out
    assert "--price-per-hour" in shown and "$/M" not in shown and main(["plan", "glm-5.1", "--gpu", "h200x4"]) == 1
    assert "6 devices hold the weights" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    ("deepseek-v4 --gpu h200x4 --api-price 0.9", "not what the machine costs"),
    ("deepseek-v4 --gpu h200x4 --price-per-hour -1", "a price is above 0"),
    ("deepseek-v4 --gpu h200x4 --price-per-hour x", "give a number"),
    ("deepseek-v5 --gpu h200x4", "did you mean deepseek-v"),
    ("deepseek-v4 --gpu toaster", "not in the catalogue"),
    ("deepseek-v4", "card without weights"),
    ("deepseek-v4 --gpu h200x4 --weights int3", "known: bf16"),
    ("deepseek-v4 --gpu h200x4 --kv-dtype int3", "known: float32"),
    ("deepseek-v4 --gpu h200x4 --batch 0", "at least 1"),
    ("deepseek-v4 --gpu h200x4 --depth 99", "at most 16"),
    ("deepseek-v4 --gpu h200x4 --context 0", "at least 1"),
    ("deepseek-v4 --gpu h200x4 --recalibrate", "--gpu here"),
])  # fmt: skip
def test_bad_input_is_named(arguments: str, message: str, capsys: Capture) -> None:
    assert main(["plan", *arguments.split()]) == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_plan_published_script_compares_predictions() -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "plan_published.py"
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert "impossible for one stream" in shown and "not predicted:" in shown
