"""`headstart bench step` on tiny models: report, profile, refused options. Times are not checked."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny

from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.core import Report
from headstart.engine.load import load_model
from headstart.errors import UsageError
from headstart.tools.bench import step as bench_step
from headstart.tools.bench.step import StepOptions
from headstart.tools.pass_timing import affordable_repeats

pytest.importorskip("headstart.kernels.native._native")
pytest.importorskip("torch")
Capture = pytest.CaptureFixture[str]
READ_BYTES = 1 << 16
PARTS = {"matrices", "attention", "head", "rows", "python"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without a head."""
    return str(write_tiny("llama", tmp_path_factory.mktemp("plain"), num_hidden_layers=2))


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_step, "IN_PLACE_STEPS", 2)


@pytest.fixture
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.tools.pass_timing.MAX_READ_BYTES", READ_BYTES)


def bench(model: str, *, backend: str = "native", **settings: Any) -> Report:
    drafting = {name: settings.pop(name) for name in ("drafter", "head") if name in settings}
    config = EngineConfig(backend=backend, threads=1, depth=settings.pop("depth", 1), **drafting)
    options = {"rows": (1, 4, 16), "context": 20, "repeats": 2, "read_bytes": READ_BYTES, **settings}
    return bench_step.run(StepOptions(model=model, config=config, **options))


def test_weight_bytes_count_the_experts_of_one_row(tmp_path: Path) -> None:
    """3 of 7 experts of a layer count; the router counts whole."""
    folder = write_tiny("glm4_moe", tmp_path, n_shared_experts=0)
    model = load_model(str(folder), EngineConfig(backend="reference", threads=1))
    used = (name for name in model.weights.used if not name.startswith(("embed_tokens", "mtp.")))
    sizes = {name: model.weights.tensors[name].data.size for name in used}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert bench_step.weight_bytes(model) == sum(sizes.values()) - experts + experts * 3 // 7


def test_draft_model_passes_are_timed_as_drafts(plain: str) -> None:
    """Passes of a draft model read no hidden states."""
    data = bench(plain, drafter="draft_model", head=plain, depth=2).data
    assert (data["draft"]["depth"], len(data["draft"]["step"]["samples_ms"])) == (2, 2 * 2)
    assert all(len(row["samples_ms"]) == 2 for row in data["passes"])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_report_of_a_model_with_a_head(headed: str, backend: str) -> None:
    report = bench(headed, backend=backend)
    data = report.data
    assert report.ok and [row["rows"] for row in data["passes"]] == [1, 4, 16]
    assert [row["logit_rows"] for row in data["passes"]] == [1, 4, 1]
    assert all(len(row["samples_ms"]) == 2 and row["min_ms"] > 0 for row in data["passes"])
    assert data["flatness"] == data["passes"][1]["median_ms"] / data["passes"][0]["median_ms"]
    steps = data["in_place"]
    assert [each["rows"] for each in steps] == [1, 2, 4, 6, 8] and all(each["steps"] >= 2 for each in steps)
    parts = ("forward_ms", "sampling_ms", "draft_ms", "host_ms", "step_ms")
    assert all(0 < each[part] <= each["step_ms"] for each in steps for part in parts)
    assert data["flatness_in_place"] == steps[2]["forward_ms"] / steps[0]["forward_ms"]
    assert data["draft"]["depth"] == 1 and (data["prefill"]["rows"], data["profile"]) == (16, None)
    assert data["machine"]["backend"] == backend
    assert ("torch" in data["machine"]["versions"]) == (backend == "reference")
    assert data["read_bandwidth"]["gb_per_s"] > 0
    assert [line.split()[0] for line in report.lines] == ["t(4)/t(1)", "t(4)/t(1)", "draft", "prefill"]
    assert [line.split()[0] for line in bench_step.header(data)] == ["model", "machine", "versions"]


def test_bytes_of_a_pass_are_weights_and_kv(plain: str) -> None:
    """All weights count except the embedding, of which single rows are read. KV counts once for all rows."""
    data = bench(plain, backend="reference").data
    model = load_model(plain, EngineConfig(backend="reference", threads=1))
    names = model.weights.used - (set() if model.config.tied else {"embed_tokens.weight"})
    total = sum(4 * int(model.weights.tensors[name].float32().size) for name in names)
    assert data["weights"] == {"format": "F32, widened to float32", "bytes_per_pass": total}
    assert data["passes"][1]["bytes"] == total + data["kv_bytes_per_position"] * (20 + 4)


def test_report_without_a_head_has_no_draft(plain: str) -> None:
    report = bench(plain, rows=(2, 3))
    assert [report.data[name] for name in ("flatness", "flatness_in_place", "draft", "prefill")] == [None] * 4
    assert [each["rows"] for each in report.data["in_place"]] == [1] and report.lines == []


def test_depth_0_drafts_nothing(headed: str) -> None:
    data = bench(headed, depth=0, profile=True).data
    assert data["draft"] is None and [each["depth"] for each in data["profile"]["steps"]] == [0]
    assert bench(headed, context=0, rows=(1,)).data["draft"]["depth"] == 1


def test_profile_has_parts_of_passes_and_steps(headed: str) -> None:
    profile = bench(headed, profile=True).data["profile"]
    assert [each["rows"] for each in profile["passes"]] == [1, 4, 16]
    assert all(each["parts_ms"].keys() == PARTS for each in profile["passes"])
    off, on = profile["steps"]
    assert (off["depth"], on["depth"]) == (0, 1) and off["parts_ms"].keys() == PARTS | {"sampling"}
    assert on["parts_ms"].keys() == PARTS | {"sampling", "draft"}
    assert on["tokens"] == off["tokens"] == off["steps"] > 0
    for each in (*profile["passes"], *profile["steps"]):
        assert sum(each["parts_ms"].values()) == pytest.approx(each["wall_ms"])


def test_rows_stay_within_the_context() -> None:
    assert bench_step.fitting_rows(StepOptions(), 10_000) == bench_step.ROWS
    assert bench_step.fitting_rows(StepOptions(), 150) == (1, 2, 3, 4, 6, 8, 16)
    assert bench_step.fitting_rows(StepOptions(rows=(8, 1, 8)), 136) == (1, 8)
    for options in (StepOptions(rows=(1, 9)), StepOptions(context=136)):
        with pytest.raises(UsageError, match="context of 136"):
            bench_step.fitting_rows(options, 136)
    assert [affordable_repeats(seconds, 1.0) for seconds in (0.0, 0.1, 9.0)] == [50, 10, 5]


def test_profile_needs_a_backend_with_timings(plain: str) -> None:
    with pytest.raises(UsageError, match="reference does not tell") as caught:
        bench(plain, backend="reference", profile=True)
    assert "--backend native" in caught.value.hint


def test_command_prints_one_json_document(headed: str, small_buffer: None, capsys: Capture) -> None:
    arguments = ["--rows", "4,1", "--context", "16", "--repeats", "1", "--depth", "1", "--threads", "1", "--json"]
    assert main(["bench", "step", headed, *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["context"] == 16
    assert [(row["rows"], len(row["samples_ms"])) for row in document["passes"]] == [(1, 1), (4, 1)]
    assert document["read_bandwidth"]["buffer_bytes"] == READ_BYTES


def test_command_prints_tables(headed: str, small_buffer: None, capsys: Capture) -> None:
    arguments = ["--rows", "1,4", "--repeats", "1", "--context", "16", "--depth", "1", "--threads", "1", "--profile"]
    assert main(["bench", "step", headed, *arguments]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("model ")
    assert all(word in shown for word in ("GB/s", "t(4)/t(1)", "sampling", "depth 0", "depth 1"))


@pytest.mark.parametrize(("arguments", "message"), [
    (["--rows", "1,x"], "--rows is '1,x', which is not a list of such values"),
    (["--rows", "0,1"], "--rows is '0,1', but must be at least 1"),
    (["--repeats", "0"], "--repeats is '0', but must be at least 1"),
    (["--kv-blocks", "9"], "--kv-blocks has no meaning"),
    (["--drafter", "ngram"], "--drafter ngram: bench step times a head"),
])  # fmt: skip
def test_wrong_options_are_named(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["bench", "step", "no-such-model", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


def test_help_of_the_group_shows_its_commands(capsys: Capture) -> None:
    assert main(["bench", "--help"]) == 0 and "headstart bench step" in capsys.readouterr().out
