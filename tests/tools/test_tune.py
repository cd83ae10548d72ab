"""`headstart tune`: choice of a setting, time limit, saved settings, servers."""

import contextlib
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import headed_model, new_folder
from tiny_models import write_tiny

from headstart.cli.main import main
from headstart.cli.serve import with_tuned
from headstart.config import AUTO, EngineConfig
from headstart.engine import load
from headstart.errors import UsageError
from headstart.system import free_port
from headstart.tools import client, tune
from headstart.tools.bench.document import BenchCell, Latency
from headstart.tools.saved import load_setting, save_setting
from headstart.tools.tune import Candidate, TuneOptions, TuningRun

CONFIG = EngineConfig(threads=1, kv_blocks=128)


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model() -> str:
    return str(write_tiny("mimo", new_folder(), num_hidden_layers=2))


def cell(mode: str, repeat: int, rate: float) -> BenchCell:
    return BenchCell(
        workload="w", mode=mode, concurrency=1, rate=None, chunked_prefill=True, repeat=repeat, complete=True,
        requests=1, failed=0, errors=(), seconds=1.0, prompt_tokens=1, cached_tokens=0, output_tokens=round(rate),
        latency=Latency(ttft=None, tpot=None, itl=None, e2e=None), speculation=None, joules=None,
    )  # fmt: skip


NOISE = (1.0, 1.01, 0.99, 1.0, 1.005, 0.995)


def tuning(speeds: dict[tuple[str, Any], float], noise: tuple[float, ...] = NOISE) -> TuningRun:
    """A run with six measured rounds at these speed-ups, with noise."""
    made = TuningRun.__new__(TuningRun)
    made.options, made.rounds = TuneOptions(concurrency=(1,)), 6
    made.workload = type("W", (), {"name": "w"})()
    made.plain = [cell("off", i, 10_000) for i in range(6)]
    made.candidates = [
        Candidate(drafter, depth, None, [cell(str(depth), i, 10_000 * speed * noise[i]) for i in range(6)])
        for (drafter, depth), speed in speeds.items()
    ]
    return made


def test_fastest_candidate_is_chosen() -> None:
    found = tuning({("mixed", 3): 1.5, ("mixed", AUTO): 1.2, ("ngram", AUTO): 1.1})
    assert found._decided() and (found.setting().drafter, found.setting().depth) == ("mixed", 3)
    found = tuning({("mixed", 3): 1.505, ("mixed", AUTO): 1.5, ("ngram", AUTO): 1.1})
    assert not found._decided() and found.setting().depth == AUTO  # auto is preferred among equals


def test_slower_drafting_is_reported_and_disabled() -> None:
    setting = tuning({("mixed", 3): 0.7, ("mixed", AUTO): 0.97}).setting()
    assert (setting.drafter, setting.depth, setting.pays) == ("none", 0, False)
    assert "does not pay here" in str(setting)


def test_insignificant_speedup_gives_no_setting() -> None:
    """Neither does an insignificant loss: noise must not disable drafting permanently."""
    noisy = (0.9, 1.05, 0.92, 1.03, 1.0, 0.94)
    for speed in (1.02, 0.97):
        found = tuning({("mixed", AUTO): speed}, noisy)
        assert found.setting() is None and found.undecided()[0].startswith("no decision: mixed auto has ")
        assert "quieter machine" in found.undecided()[1]
    assert tuning({("mixed", AUTO): 1.02}).setting().pays


@pytest.mark.parametrize("pairs", [0, 1, 2, 5])
def test_few_pairs_give_no_setting(pairs: int) -> None:
    found = tuning({("mixed", AUTO): 1.5})
    found.candidates[0].cells = found.candidates[0].cells[:pairs]
    assert found.setting() is None and "more --minutes" in found.undecided()[1]


class FakeClock:
    """Replaces measurements: each cell takes `seconds` on a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds
        monkeypatch.setattr(tune.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(tune, "measure", self.measure)
        monkeypatch.setattr(tune, "warm_up", self.warm_up)

    def warm_up(self, runner: Any, workload: Any, mode: str) -> None:
        self.now += self.seconds / 2

    def measure(self, runner: Any, workload: Any, mode: str, load: Any, repeat: int = 0) -> BenchCell:
        self.now += self.seconds
        made = cell(mode, repeat, 10_000 * NOISE[repeat % 6] * (1 if mode == "off" else 1.3))
        return replace(made, concurrency=load.concurrency)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.1, 1.0, 3.0, 10.0, 50.0])
def test_time_limit_is_kept(seconds: float, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer cells leave fewer candidates, so that the remaining ones get enough pairs."""
    clock = FakeClock(monkeypatch, seconds)
    report = tune.run(TuneOptions(model=model, config=CONFIG, workload="repetitive", minutes=1))
    least = 2 * seconds + seconds / 2  # the first timing
    assert clock.now <= max(60, least) + seconds / 2
    if seconds <= 1:
        assert report.data["choice"]["drafter"] != "none"
        assert report.data["choice"]["speedup"][0] == pytest.approx(1.3, rel=0.02)
    tried = len(report.data["candidates"])
    assert tried > 9 if seconds < 1 else tried > 5 if seconds == 1 else tried < 5
    if seconds >= 10:
        assert tried == 2 and report.data["choice"] is None
        assert report.lines[0].startswith("no decision") and load_setting(model, CONFIG) is None


def test_setting_is_saved_and_loaded(model: str) -> None:
    assert load_setting(model, CONFIG) is None and with_tuned(model, CONFIG) == CONFIG
    setting = tuning({("ngram", 2): 1.3}).setting()
    path = save_setting(model, CONFIG, setting)
    assert load_setting(model, CONFIG) == setting
    found = with_tuned(model, CONFIG)
    assert (found.drafter, found.depth) == ("ngram", 2)
    assert load_setting(model, replace(CONFIG, threads=2)) is None  # other thread counts have other settings
    path.write_text("{")
    assert load_setting(model, CONFIG) is None


@pytest.mark.slow
def test_tune_measures_candidates_and_saves_the_setting(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "MAX_ROUNDS", 1)
    monkeypatch.setattr(tune, "MIN_PAIRS", 1)
    setting = tuning({("ngram", 2): 1.3}).setting()
    monkeypatch.setattr(TuningRun, "setting", lambda self: replace(setting, workload="repetitive"))
    options = TuneOptions(model=model, config=CONFIG, workload="repetitive", concurrency=(1,))
    report = tune.run(options)
    assert report.data["pairs"] >= 1
    names = {(row["drafter"], row["depth"]) for row in report.data["candidates"]}
    assert {("none", 0), ("mixed", AUTO), ("mixed", 3), ("ngram", AUTO)} <= names
    repeated = tune.run(options)
    assert repeated.data["kept"] and repeated.lines[0].startswith("tuned before")


def test_tuning_without_drafter_is_refused(model: str) -> None:
    with pytest.raises(UsageError, match="nothing to tune"):
        tune.run(TuneOptions(model=model, config=replace(CONFIG, drafter="none")))


def test_other_shipped_heads_are_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    model = headed_model("mimo")
    monkeypatch.setattr(load, "shipped_heads", lambda checkpoint: {"mtp": Path("first"), "eagle3": Path("second")})
    monkeypatch.setattr(load, "read_head", lambda path: None)
    monkeypatch.setattr(load, "fit_head", lambda model, head, path: replace(model.head, source=str(path)))
    ((kind, other),) = load.other_heads(model).items()
    assert (kind, other.head.source) == ("eagle3", "second")


def serve_command(model: str, port: int, *words: str) -> str:
    settings = "--threads 1 --kv-blocks 128 --no-web"
    return f"{sys.executable} -m headstart serve {model} --port {port} {settings} {' '.join(words)}"


@pytest.mark.slow
def test_server_is_tuned_by_request_field_and_by_restart(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "MAX_ROUNDS", 1)
    monkeypatch.setattr(tune, "DEPTHS", (1,))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    start, start_off = (serve_command(model, port, word) for word in ("--depth {depth}", "--no-mtp"))
    options = TuneOptions(url=url, workload="repetitive", concurrency=(1,), start=start, start_off=start_off)
    report = tune.run(options)
    rows = {(row["drafter"], row["depth"]): row for row in report.data["candidates"]}
    assert set(rows) == {("none", 0), ("server", 1)} and all(row["pairs"] == 1 for row in rows.values())
    assert 1 <= rows["server", 1]["acceptance_length"] <= 2
    with subprocess.Popen(shlex.split(start_off.replace("--no-mtp", "--depth auto"))) as running:
        try:
            while not answers(url):
                assert running.poll() is None
                time.sleep(0.1)
            found = tune.run(replace(options, start=None, start_off=None))
            assert {row["depth"] for row in found.data["candidates"]} == {0, AUTO, 1}
            with pytest.raises(UsageError, match=r"a server answers at .* already"):
                tune.run(options)
        finally:
            running.terminate()


def answers(url: str) -> bool:
    with contextlib.suppress(UsageError):
        return bool(client.list_models(client.Server.at(url)))
    return False


def test_failed_server_command_is_reported() -> None:
    start_off = "sh -c 'echo no such model; exit 3'"
    options = TuneOptions(url="http://127.0.0.1:9", start="true {depth}", start_off=start_off)
    with pytest.raises(UsageError, match="ended with code 3: no such model"):
        tune.run(options)
    with pytest.raises(UsageError, match="cannot run missing-program"):
        tune.run(replace(options, start_off="missing-program"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--start", "a {depth}"], "are for servers"),
        (["--url", "http://127.0.0.1:9", "--start", "a {depth}"], "belong together"),
        (["--url", "http://127.0.0.1:9", "--start", "a", "--start-off", "a"], "without {depth}"),
        (["--url", "http://127.0.0.1:9", "--threads", "1"], "--threads has no meaning"),
    ],
)
def test_contradicting_server_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words]) == 2 and message in capsys.readouterr().err
