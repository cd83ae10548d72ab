"""`headstart bench` in process: statistics, workloads, runs on tiny models, the document and its report."""

import json
import os
import re
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from support import until

from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.errors import CapacityError, UsageError
from headstart.svg import log_ticks, nice_ticks
from headstart.tools.bench import report, run as bench, summary, workloads
from headstart.tools.bench.document import BenchCell, BenchDocument, Distribution, DraftCounts, Latency
from headstart.tools.bench.inprocess import InProcessTarget
from headstart.tools.bench.measure import AnswerSample, EnergyMeter, RequestLoad, RunOutcome, measure
from headstart.tools.bench.report import render
from headstart.tools.bench.run import BenchOptions
from headstart.tools.bench.summary import compare_documents, cost_per_million, pooled, rows_of
from headstart.tools.bench.workloads import Task, Workload

pytest.importorskip("headstart.kernels.native._native")
Capture = pytest.CaptureFixture[str]
NO_TIMES = Latency(ttft=None, tpot=None, itl=None, e2e=None)
TINY = EngineConfig(backend="native", threads=1, max_model_len=256, kv_blocks=128)


def cell(speed: float = 100.0, *, mode: str = "off", repeat: int = 0, **changes: Any) -> BenchCell:
    """A one-second run with `speed` output tokens."""
    plain = BenchCell(
        workload="w", mode=mode, concurrency=1, rate=None, chunked_prefill=True, repeat=repeat, complete=True,
        requests=4, failed=0, errors=(), seconds=1.0, prompt_tokens=50, cached_tokens=0, output_tokens=round(speed),
        latency=NO_TIMES, speculation=None, joules=None,
    )  # fmt: skip
    return replace(plain, **changes)


def cells(speeds: Seq[float], mode: str = "off") -> list[BenchCell]:
    return [cell(speed, mode=mode, repeat=repeat) for repeat, speed in enumerate(speeds)]


# Statistics.


def test_speedup_is_the_median_over_pairs_of_the_same_repeat() -> None:
    found = summary.speedup(cells([100, 200, 100, 100, 100]), cells([110, 240, 130, 120, 900], "auto"))
    assert (found.point, found.pairs) == (pytest.approx(1.2), 5) and found.low <= found.point <= found.high
    off = [cell(100, repeat=0), cell(1000, repeat=1), cell(9, repeat=2, complete=False)]
    found = summary.speedup(off, [cell(200, mode="auto", repeat=repeat) for repeat in (2, 0)])
    assert (found.point, found.low, found.pairs) == (pytest.approx(2.0), None, 1)
    assert summary.speedup(cells([100]), []) is None
    found = summary.speedup(cells([100] * 10), cells([150] * 10, "auto"))
    assert (found.low, found.high) == (pytest.approx(1.5), pytest.approx(1.5))


def test_confidence_interval_has_its_nominal_coverage() -> None:
    """With a true ratio of 1 and 5 % noise, about 95 of 100 intervals contain 1; the bootstrap is approximate."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(100):
        found = summary.paired(tuple((1.0, value) for value in np.exp(rng.normal(0, 0.05, 12)).tolist()))
        hits += found.low <= 1 <= found.high
    assert 88 <= hits <= 100


@pytest.mark.parametrize(("auto", "ok"), [
    ([101] * 10, True),
    ([97] * 10, False),
    ([100, 100, 100, 100, 100, 100, 80, 80, 80, 80], False),  # the median is 1, the lower bound is below
    ([120] * 9, None),
])  # fmt: skip
def test_never_slower_check(auto: list[float], ok: bool | None) -> None:
    assert summary.never_slower(cells([100] * len(auto)), cells(auto, "auto")).ok is ok


def test_best_depth_is_chosen_on_even_pairs_and_measured_on_odd_ones() -> None:
    fixed = {"1": cells([110, 100] * 5, "1"), "3": cells([105, 200] * 5, "3")}
    check = summary.near_best(fixed, cells([99] * 10, "auto"))
    assert check.ok is True and "of mode 1" in check.text
    assert (check.ratio.point, check.ratio.pairs) == (pytest.approx(0.99), 5)
    assert summary.near_best({"1": cells([110] * 10, "1")}, cells([100] * 10, "auto")).ok is False


def test_cost_speed_and_distributions() -> None:
    times = replace(NO_TIMES, tpot=Distribution.of([0.004, 0.006]))
    assert cell(100, rate=2.0, concurrency=None, latency=times).speed == pytest.approx(200)
    assert cost_per_million(3.6, 1000) == pytest.approx(1.0) and cost_per_million(None, 1000) is None
    found = Distribution.of([i / 1000 for i in range(1, 101)])
    assert (found.count, found.mean, found.p50) == (100, pytest.approx(50.5), pytest.approx(50.5))
    assert (found.quantiles[0], found.quantiles[-1]) == (pytest.approx(1), pytest.approx(100))
    assert Distribution.of([]) is None
    low, high = [i / 1000 for i in range(100)], [i / 1000 for i in range(200, 500)]
    both, whole = pooled([Distribution.of(low), None, Distribution.of(high)]), Distribution.of(low + high)
    assert (both.count, both.mean) == (whole.count, pytest.approx(whole.mean))
    assert (both.p50, both.p90) == pytest.approx((whole.p50, whole.p90), rel=0.02)


# BenchDocument and rows.


def test_acceptance_counts_drafts_that_had_the_position() -> None:
    counts = DraftCounts(drafts=10, drafted=14, accepted=7, per_position=(5, 2), drafted_at=(10, 4))
    assert (counts.acceptance_rate, counts.acceptance_length) == (0.5, 1.7) and counts.acceptance_at == [0.5, 0.5]
    assert replace(counts, drafted_at=None).acceptance_at == [0.5, 0.2]
    total = DraftCounts.total([counts, DraftCounts(drafts=1, drafted=3, accepted=3, per_position=(1, 1, 1))])
    assert (total.drafts, total.per_position, total.drafted_at) == (11, (6, 3, 1), None)
    assert DraftCounts.total([counts, None]) is None


def test_rows_leave_out_incomplete_cells() -> None:
    found = rows_of([cell(100), cell(50, repeat=1, complete=False), cell(120, mode="auto")], price_per_hour=0.36)
    assert [(row.mode, row.cells) for row in found] == [("off", 1), ("auto", 1)]
    assert found[0].cost_per_million == pytest.approx(1.0) and found[1].speedup.point == pytest.approx(1.2)


# Workloads.


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("name", workloads.names())
def test_builtin_workloads_are_distinct_and_deterministic(name: str) -> None:
    (workload,) = workloads.find(name, words)
    tasks = workload.tasks(60)
    assert tasks == workload.tasks(60) and tasks[:4] == workload.tasks(4)
    assert len({task.turns for task in tasks}) == 60
    assert not any(re.search(r"\{[a-z_]+\d?\}", turn) for task in tasks for turn in task.turns)


@pytest.mark.parametrize("length", [1, 10, 500])
def test_synthetic_prompts_have_the_requested_length(length: int) -> None:
    tasks = workloads.synthetic(length, words).tasks(3)
    assert [words(task.turns[0]) for task in tasks] == [length] * 3
    assert length < 10 or len({task.turns for task in tasks}) == 3


def test_synthetic_prompts_use_the_given_texts_and_temperature() -> None:
    hot = workloads.synthetic(20, words, ["only these words"], name="s").at(0.7)
    (task,) = hot.tasks(1)
    assert set(task.turns[0].split()) == {"only", "these", "words"}
    assert (hot.name, task.temperature) == ("s T=0.7", 0.7)
    with pytest.raises(UsageError, match="unknown"):
        workloads.find("cooking", words)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Prompts in Spec-Bench's layout and in headstart's own."""
    records: list[dict[str, Any]] = [
        {"question_id": 1, "category": "math", "turns": ["1 + 1?", "and 2?"]},
        {"category": "math", "prompt": "3 + 3?", "max_tokens": 5, "temperature": 1},
        {"category": "qa", "messages": [{"role": "system", "content": "Short."}, {"role": "user", "content": "Who?"}]},
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return path


def test_file_workload_alternates_categories_or_selects_one(questions: Path) -> None:
    (workload,) = workloads.find(str(questions), words)
    assert [task.turns for task in workload.tasks(4)] == [("1 + 1?",), ("Who?",), ("3 + 3?",), ("1 + 1?",)]
    assert workload.tasks(2)[1].system == "Short."
    assert [each.name for each in workloads.find(f"{questions}:each", words)] == ["math", "qa"]
    (math_only,) = workloads.find(f"{questions}:math", words)
    assert [(task.max_tokens, task.temperature) for task in math_only.tasks(2)] == [(64, 0), (5, 1)]
    with pytest.raises(UsageError, match="no category 'art'"):
        workloads.find(f"{questions}:art", words)


@pytest.mark.parametrize(("lines", "message"), [
    ('{"prompt": "a"}\n{oops\n', "1 bad line of 2: line 2 is not JSON"),
    ("[1]\n", "line 1 is not a JSON object"),
    ('{"prompt": " "}\n{"text": "a"}\n', "2 bad lines of 2: line 1 has no prompt; line 2 has no prompt"),
    ('{"prompt": "a", "max_tokens": 0}\n', "line 1 has max_tokens 0"),
    ('{"prompt": "a", "temperature": "hot"}\n', "line 1 has temperature 'hot'"),
    ("x\n" * 9, "and 6 more"),
    ("\n", "holds no task"),
])  # fmt: skip
def test_bad_lines_of_a_workload_file_are_named(tmp_path: Path, capsys: Capture, lines: str, message: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(lines)
    assert main(["bench", "--workload", str(path)]) == 2 and message in capsys.readouterr().err


# Runs in process.


@pytest.fixture(scope="module")
def runner(headed: str) -> InProcessTarget:
    return InProcessTarget(headed, TINY)


def sums(count: int, **changes: Any) -> Workload:
    tasks = [Task(turns=(f"What is {i} and {i}?",), max_tokens=6, ignore_eos=True, **changes) for i in range(count)]
    return Workload("sums", tasks.__getitem__)


@pytest.mark.parametrize("mode", ["off", "2", "auto"])
def test_measure_counts_requests_tokens_and_drafts(runner: InProcessTarget, mode: str) -> None:
    found = measure(runner, sums(5), mode, RequestLoad(concurrency=2), num_requests=5, repeat=3)
    assert (found.complete, found.requests, found.failed, found.repeat) == (True, 5, 0, 3)
    assert (found.output_tokens, found.cached_tokens) == (30, 0) and found.latency.ttft.count == 5
    if mode != "auto":  # auto drafts only where drafting pays
        assert (found.speculation.drafts > 0) == (mode != "off")
        assert len(found.speculation.per_position) == {"off": 0, "2": 2}[mode]


def test_mode_off_has_no_drafter(runner: InProcessTarget) -> None:
    measure(runner, sums(1), "off", RequestLoad(concurrency=1), num_requests=1)
    assert runner._plain is not None and runner._plain.engine.drafting.drafter is None
    assert runner._drafting.engine.drafting.drafter is not None


def test_concurrency_is_never_exceeded(runner: InProcessTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = runner._drafting.engine, list[int]()
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda deliver: (seen.append(len(engine.live)), step(deliver)))
    measure(runner, sums(7), "auto", RequestLoad(concurrency=3), num_requests=7)
    assert max(seen) == 3


def test_prefix_cache_is_not_reused_between_runs(runner: InProcessTarget) -> None:
    workload = Workload("long", lambda index: Task(turns=("again and " * 30,), max_tokens=2))
    found = [measure(runner, workload, "off", RequestLoad(concurrency=1), num_requests=1) for _ in range(2)]
    assert [each.cached_tokens for each in found] == [0, 0]


def test_turns_of_a_task_share_the_conversation(runner: InProcessTarget) -> None:
    task = Task(turns=("one", "two", "three"), system="You count.", max_tokens=4, ignore_eos=True)
    found = measure(runner, Workload("talk", lambda index: task), "auto", RequestLoad(concurrency=2), num_requests=2)
    assert (found.requests, found.output_tokens) == (6, 24)
    assert found.cached_tokens  # earlier turns come from the prefix cache


def test_request_rate_gives_random_reproducible_arrivals(runner: InProcessTarget) -> None:
    load = RequestLoad(rate=200.0, seed=1)
    due = list(load.arrivals(6))
    found = measure(runner, sums(6), "off", load, num_requests=6)
    assert (found.concurrency, found.rate, found.requests) == (None, 200.0, 6) and found.seconds >= due[-1]
    assert due == sorted(due) == list(load.arrivals(6))


@pytest.mark.parametrize(("mode", "message"), [("17", "1 to 16"), ("0", "1 to 16"), ("deep", "unknown")])
def test_unknown_modes_are_refused(runner: InProcessTarget, mode: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure(runner, sums(1), mode, RequestLoad(concurrency=1), num_requests=1)


def test_prompts_beyond_the_context_are_refused_or_fail_alone(runner: InProcessTarget) -> None:
    with pytest.raises(CapacityError, match="the context holds 256"):
        runner.check([Task(turns=("x " * 300,))])
    task = Task(turns=("one", "x " * 300), max_tokens=2)
    found = measure(runner, Workload("talk", lambda index: task), "off", RequestLoad(concurrency=1), num_requests=1)
    assert (found.requests, found.failed) == (2, 1) and "the context holds 256" in found.errors[0]


def test_chunked_prefill_option_reaches_the_scheduler(headed: str) -> None:
    small = replace(TINY, max_num_batched_tokens=16)
    engines = [InProcessTarget(headed, small, chunked_prefill=chunked)._drafting.engine for chunked in (True, False)]
    assert [engine.scheduler.chunks_prompts for engine in engines] == [True, False]


# The whole bench.


@pytest.fixture(scope="module")
def measured(headed: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchDocument, Path]:
    folder = tmp_path_factory.mktemp("bench")
    options = BenchOptions(
        model=headed, config=TINY, workloads=("prose", "repetitive"), concurrency=(1, 2), requests=2, output_tokens=4,
        modes=("off", "1", "auto"), pairs=2, price_per_hour=1.0, out=folder / "a.json", report=folder / "a.html",
    )  # fmt: skip
    report, document = bench.run(options)
    assert report.ok
    return document, folder


class FixedLatencyTarget:
    """A target whose runs return at once and report fixed latencies."""

    chunked_prefill, is_local, modes, description = True, True, ("off", "auto"), {"model": "m"}

    def __init__(self, ttft_s: float, tpot_s: float) -> None:
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self.runs: list[tuple[int, int, int | None]] = []  # concurrency, requests, max_tokens

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def check(self, tasks: Seq[Task]) -> None: ...

    def settle(self, tasks: Seq[Task], mode: str) -> None: ...

    def run(self, tasks: Seq[Task], mode: str, load: RequestLoad, notify: Callable[[], None]) -> RunOutcome:
        self.runs.append((load.concurrency or 0, len(tasks), tasks[0].max_tokens))
        samples = [
            AnswerSample(output_tokens=task.max_tokens, ttft_s=self.ttft_s,
                         seconds=self.ttft_s + self.tpot_s * (task.max_tokens - 1))
            for task in tasks
        ]  # fmt: skip
        return RunOutcome(samples=samples, seconds=sum(each.seconds for each in samples), speculation=None)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "given", "runs"),
    [
        (0.06, 0.003, {}, [(1, 8, 64), (4, 8, 64), (16, 32, 64)]),
        (0.15, 0.0075, {}, [(1, 8, 64), (4, 8, 64)]),
        (0.5, 0.025, {}, [(1, 4, 32), (4, 4, 32)]),
        (60.0, 3.0, {}, [(1, 1, 8)]),
        (60.0, 3.0, {"output_tokens": 32}, [(1, 8, 32), (4, 8, 32), (16, 32, 32)]),
        (60.0, 3.0, {"concurrency": (2,)}, [(2, 8, 64)]),
    ],
)
def test_default_load_depends_on_the_measured_speed(
    ttft_s: float, tpot_s: float, given: dict[str, Any], runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = FixedLatencyTarget(ttft_s, tpot_s)
    monkeypatch.setattr(bench, "_targets", lambda *_: iter([target]))
    report, document = bench.run(BenchOptions(pairs=1, modes=("off",), **given))
    assert target.runs[-len(runs) :] == runs
    assert document.settings["loads"] == [f"{concurrency} at a time" for concurrency, *_ in runs]
    note = f"note: requests of a run: {', '.join(f'{count} with {each} at a time' for each, count, _ in runs)}"
    said = f"{note}, answers of at most {runs[0][2]} tokens, as one request alone has {1 / tpot_s:.3g} tokens/s"
    assert any(line.startswith(said) for line in report.lines) == (not given)


@pytest.mark.slow
def test_modes_alternate_and_the_document_round_trips(measured: tuple[BenchDocument, Path]) -> None:
    document, folder = measured
    assert [each.mode for each in document.cells[:6]] == ["off", "1", "auto", "auto", "1", "off"]
    assert BenchDocument.read(folder / "a.json") == document
    assert (document.complete, len(document.rows), len(document.cells)) == (True, 12, 24)
    assert not list(folder.glob(".*"))
    assert {check.ok for check in document.checks} == {None}  # ten pairs are needed
    counts = DraftCounts.total(cell.speculation for cell in document.cells if cell.speculation)
    assert counts and sum(counts.sources.values()) == counts.accepted
    by_drafter = ", ".join(f"{name} {count}" for name, count in counts.sources.items())
    assert f"accepted tokens by drafter: {by_drafter}" in document.notes


def test_report_is_self_contained_with_valid_plots(measured: tuple[BenchDocument, Path]) -> None:
    text = (measured[1] / "a.html").read_text("utf-8")
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    plots = [ElementTree.fromstring(plot) for plot in re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL)]
    assert len(plots) >= 2 * (1 + 1 + 6 + 1 + 1) + 2
    titles = ("Speed-up by load", "Speed-up by workload", "Throughput", "Latency", "Acceptance by position", "Cost")
    assert [title for title in titles if f"<h2>{title}</h2>" in text] == list(titles)


def test_report_explains_modes_and_shows_draft_counts(measured: tuple[BenchDocument, Path]) -> None:
    """Legends describe each mode; every position shows its number of drafts; the page fits phones and dark mode."""
    text = (measured[1] / "a.html").read_text("utf-8")
    for words in ("off: plain decoding", "depth 1: always 1 drafted", "auto: drafted as deep as pays"):
        assert words in text
    shown = re.findall(r"of ([\d,]+)</small>", text)
    first = {(row.workload, row.mode): row for row in reversed(measured[0].rows) if row.acceptance_at}.values()
    assert len(shown) == sum(len(row.acceptance_at) for row in first) > 0
    assert all(int(count.replace(",", "")) > 0 for count in shown) and "prefers-color-scheme: dark" in text
    assert set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{3,6})"', text)) <= set(report.DARK)
    assert "minmax(min(100%, 360px)" in text  # columns fit a phone


def test_plots_of_one_kind_have_the_same_axes(measured: tuple[BenchDocument, Path]) -> None:
    rows = [replace(row, workload=f"w{i}", output_tokens_per_s=10.0**i) for i in (1, 3) for row in measured[0].rows[:1]]
    text = render(replace(measured[0], rows=tuple(rows)))
    plots = re.findall(r'<svg viewBox[^>]*aria-label="Throughput: .*?</svg>', text, re.DOTALL)
    ticks = [re.findall(r'text-anchor="end"[^>]*>([^<]*)<', plot) for plot in plots]
    assert len(plots) == 2 and ticks[0] == ticks[1]


@pytest.mark.parametrize(("share", "count"), [(0.0, 3), (1.0, 3), (0.5, 10), (0.9, 100_000)])
def test_wilson_interval_contains_the_share(share: float, count: int) -> None:
    low, high = report.wilson(share, count)
    assert 0 <= low <= share <= high <= 1 and high - low < 2 / count**0.5


def test_fewer_requests_than_the_concurrency_are_refused() -> None:
    assert [load.concurrency for load in BenchOptions(requests=4).loads] == [1, 4]
    with pytest.raises(UsageError, match="never run at a time"):
        BenchOptions(requests=4, concurrency=(1, 8))


def test_report_escapes_names_and_handles_missing_data(measured: tuple[BenchDocument, Path]) -> None:
    document = measured[0]
    rows = tuple(replace(row, workload="<b>", cost_per_million=None) for row in document.rows)
    broken = replace(document, rows=rows, complete=False, error="the server <died>", cells=(cell(complete=False),))
    text = render(broken)
    assert "<b>mixed" not in text and "&lt;b&gt;" in text and "the server &lt;died&gt;" in text
    assert "<h2>Cost</h2>" not in text and "All numbers" in render(replace(document, rows=(), checks=(), cells=()))


def test_compare_reports_ratios_of_two_documents(
    measured: tuple[BenchDocument, Path], tmp_path: Path, capsys: Capture
) -> None:
    document = measured[0]
    twice = tuple(replace(each, output_tokens=2 * each.output_tokens) for each in document.cells)
    faster = replace(document, cells=twice, rows=tuple(rows_of(twice)), source={**document.source, "model": "other"})
    after = tmp_path / "b.json"
    after.write_text(json.dumps(faster.json()))
    report = compare_documents(measured[1] / "a.json", after)
    assert len(report.data["rows"]) == 12
    assert all(row["ratio"]["point"] == pytest.approx(2) for row in report.data["rows"])
    assert any("model" in line and "other" in line for line in report.lines)
    after.write_text(json.dumps(replace(document, rows=()).json()))
    assert main(["bench", "--compare", str(measured[1] / "a.json"), str(after)]) == 2
    assert "in common" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raised", "code", "error"), [(KeyboardInterrupt(), 130, "interrupted"), (CapacityError("no room"), 1, "no room")]
)
def test_interrupted_or_failed_runs_keep_finished_cells(
    headed: str, tmp_path: Path, capsys: Capture, raised: BaseException, code: int, error: str
) -> None:
    out, calls = tmp_path / "a.json", count(1)

    def stopped(*args: Any, **settings: Any) -> BenchCell:
        if next(calls) == 3:
            raise raised
        return measure(*args, **settings)

    arguments = ["--backend", "native", "--max-model-len", "256", "--kv-blocks", "128", "--workload", "prose"]
    arguments += ["--output-tokens", "2", "--concurrency", "1", "--requests", "1", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.measure, "measure", stopped)
        assert main(["bench", headed, *arguments]) == code
    document = BenchDocument.read(out)
    assert (document.complete, document.error, len(document.cells)) == (False, error, 2)
    assert f"INCOMPLETE: {error}" in capsys.readouterr().out


def test_document_is_written_after_each_load(headed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process leaves the loads that were finished."""
    out, seen = tmp_path / "a.json", list[tuple[bool, int]]()

    def watched(*args: Any, **settings: Any) -> BenchCell:
        if out.exists():
            document = BenchDocument.read(out)
            seen.append((document.complete, len(document.cells)))
        return measure(*args, **settings)

    monkeypatch.setattr(bench.measure, "measure", watched)
    options = BenchOptions(
        model=headed, config=TINY, workloads=("prose",), concurrency=(1, 2), requests=2, output_tokens=2,
        modes=("off",), pairs=2, out=out,
    )  # fmt: skip
    bench.run(options)
    assert seen == [(False, 2), (False, 2)] and BenchDocument.read(out).complete


def test_command_prints_one_json_document(headed: str, capsys: Capture) -> None:
    arguments = ["--max-model-len", "256", "--kv-blocks", "128", "--preset", "sharegpt-2500-1500", "--scale", "0.005"]
    assert main(["bench", headed, *arguments, "--concurrency", "2", "--requests", "2", "--pairs", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["workload"], row["mode"]) for row in found["rows"]] == [
        ("sharegpt-2500-1500", "off"), ("sharegpt-2500-1500", "auto"),
    ]  # fmt: skip
    assert [each["output_tokens"] for each in found["cells"]] == [16, 16]
    assert "no cost: give the machine's price with --price-per-hour" in found["notes"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--price-per-hour", "-1"], "--price-per-hour is '-1', but must be above 0"),
    (["--concurrency", "0"], "--concurrency is '0', but must be at least 1"),
    (["--concurrency", "1", "--request-rate", "2"], "both given"),
    (["--request-rate", "nan"], "--request-rate is 'nan', but must be above 0"),
    (["--temperature", "0,-1"], "temperature is -1.0"),
    (["--preset", "nope"], "--preset is 'nope'"),
    (["--preset", "sharegpt-2500-1500", "--workload", "code"], "both given"),
    (["--depth", "3"], "--depth and --no-mtp"),
    (["--chunked-prefill", "maybe"], "--chunked-prefill is 'maybe'"),
    (["--off-url", "http://x"], "give --url too"),
    (["--url", "http://x", "--chunked-prefill", "off"], "cannot be changed over HTTP"),
    (["--out", __file__], "exists"),
    (["--compare", __file__, __file__], "is not JSON"),
    *(([flag, str(10**20)], "at most") for flag in ("--requests", "--scale", "--input-tokens", "--pairs")),
])  # fmt: skip
def test_bad_options_are_named(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err + shown.err.partition("hint: ")[2] and not shown.out


# Energy and axes.


def test_energy_of_cpu_packages_is_summed(tmp_path: Path) -> None:
    for name, value in {"intel-rapl:0": 1_000_000, "intel-rapl:1": 900_000, "intel-rapl:0:0": 5}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{value}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("1000000\n")
    with (meter := EnergyMeter(tmp_path, "no-such-program")):
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text("3500000\n")
        (tmp_path / "intel-rapl:1" / "energy_uj").write_text("400000\n")  # the counter wrapped around
    assert meter.joules == pytest.approx(2.5 + 0.5)
    with (meter := EnergyMeter(tmp_path / "none", "no-such-program")):
        pass
    assert meter.joules is None


def test_energy_of_gpus_is_integrated_from_power(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nfor i in 1 2 3; do echo '0, 100.0'; echo '1, [N/A]'; done\nexec sleep 60\n")
    program.chmod(0o755)
    begun = time.perf_counter()
    with (meter := EnergyMeter(tmp_path / "none", str(program))):
        until(lambda: os.fstat(meter._power._output.fileno()).st_size)
    assert 0 < meter.joules <= 100 * (time.perf_counter() - begun)


@pytest.mark.parametrize(
    ("ticks_of", "low", "high"),
    [*((nice_ticks, *ends) for ends in ((0, 1), (0.7, 1.3), (0, 283), (3e-4, 5e-4))),
     *((log_ticks, *ends) for ends in ((1, 1000), (5.2, 6.1), (0.001, 90000), (40, 60)))],
)  # fmt: skip
def test_axis_ticks_are_few_and_inside_the_range(ticks_of: Any, low: float, high: float) -> None:
    ticks = ticks_of(low, high)
    assert 3 <= len(ticks) <= 9 and low * 0.99 - 1e-9 <= ticks[0] and ticks[-1] <= high * 1.01


def test_force_replaces_only_files_of_headstart_bench(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"kind": "mine"}')
    (tmp_path / "old.json").write_text('{\n  "kind": "headstart-bench"\n}')
    (tmp_path / "old.html").write_text("<!doctype html>\n<title>headstart bench: x</title>")
    for name in ("mine.json", "."):
        with pytest.raises(UsageError, match="not written by headstart bench"):
            BenchOptions(out=tmp_path / name, force=True)
    BenchOptions(out=tmp_path / "old.json", report=tmp_path / "old.html", force=True)
