"""The fleet simulation against queueing theory, and the command `plan --fleet`."""

import json

import numpy as np
import pytest

from headstart.cli.main import main
from headstart.errors import UsageError
from headstart.tools.plan import fleet
from headstart.tools.plan.fleet import FleetLoad, parse_load
from headstart.tools.plan.simulate import Arrivals, PrefillRows, poisson_arrivals, simulate

Capture = pytest.CaptureFixture[str]
TEXT = "100 req/s, 1500 in, 300 out, TTFT 1 s, TPOT 40 ms"


def test_one_engine_with_one_slot_is_an_mg1_queue() -> None:
    """M/G/1: mean waiting time = rate * E[S^2] / (2 (1 - rate * E[S])) (Pollaczek-Khinchine)."""
    asked = poisson_arrivals(0.6, 1000, 1, 12_000, seed=3)
    asked = Arrivals(times=asked.times, prompts=asked.prompts, outputs=np.ones(12_000))
    served = simulate(lambda decoding, context, read: (read.rows / 1000, 1.0), asked, engines=1, slots=1, rows=10**6)
    spans = asked.prompts / 1000
    waits = 0.6 * np.mean(spans**2) / (2 * (1 - 0.6 * np.mean(spans)))
    assert np.mean(served.ttft_s) == pytest.approx(waits + np.mean(spans), rel=0.05)
    assert served.busy == pytest.approx(0.6, rel=0.03)


def test_prompts_and_answers_share_steps() -> None:
    """Steps take 1 s, have 16 rows and give two tokens. The second prompt takes two steps beside the first answer."""
    asked = Arrivals(times=np.array([0.0, 0.0]), prompts=np.array([10.0, 20.0]), outputs=np.array([5.0, 9.0]))
    seen: list[tuple[int, float, PrefillRows]] = []

    def step(decoding: int, context: float, read: PrefillRows) -> tuple[float, float]:
        seen.append((decoding, context, read))
        return 1.0, 2.0

    served = simulate(step, asked, engines=1, slots=4, rows=16)
    assert [(decoding, read.rows) for decoding, _, read in seen] == [(0, 10), (1, 15), (1, 5), *[(1, 0)] * 4]
    assert seen[0][2] == PrefillRows(1, 10, 5, 1)  # rows attend to half of their chunk on average
    assert seen[2][1:] == (10 + 2, PrefillRows(1, 5, 15 + 2.5, 1))  # two tokens decoded, 15 rows read
    assert list(served.ttft_s) == [1.0, 3.0] and list(served.tpot_s) == [0.5, 0.5] and served.busy == 1.0


def test_waiting_falls_with_engines_and_slots() -> None:
    asked = poisson_arrivals(5, 100, 50, 1000)

    def step(decoding: int, context: float, read: PrefillRows) -> tuple[float, float]:
        return 0.01 + decoding * 1e-3 + read.rows * 1e-4, 1.0

    def mean_wait(engines: int, slots: int) -> float:
        return float(np.mean(simulate(step, asked, engines=engines, slots=slots, rows=512).ttft_s))

    assert mean_wait(1, 64) > mean_wait(2, 64) > 0 and mean_wait(2, 2) > mean_wait(2, 64)


def test_load_text_is_parsed() -> None:
    load = FleetLoad(rate=100, prompt=1500, output=300, ttft_s=1, tpot_s=0.04)
    assert parse_load(TEXT) == load
    assert parse_load("TPOT 0.04s,TTFT 1000ms, 300 out,1500 in, 6000 requests/min, p95") == load
    for text, message in (
        ("fast", "'fast' is not understood"),
        ("100 req/s, 1500 in, 300 out, TTFT 1 s", "lacks TPOT"),
        (f"{TEXT}, 5 in", "gives prompt a second time"),
        (TEXT.replace("300", "0"), "must be above 0"),
        (f"{TEXT}, p100", "p100, but it goes from p50"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_load(text)


@pytest.mark.slow
def test_fleet_needs_fewer_machines_with_drafts(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_REQUESTS", 1500)
    monkeypatch.setattr(fleet, "MAX_DISAGGREGATED_REQUESTS", 600)
    load = TEXT.replace("100 req/s", "30 req/s")
    command = ["plan", "glm-4.5", "--gpu", "h200x8", "--price-per-hour", "2", "--json", "--fleet"]
    assert main([*command, load]) == 0
    plain, drafts = json.loads(capsys.readouterr().out)["fleet"]["rows"]
    assert plain["drafter"] == "none" and drafts["drafter"] == "mtp" and plain["machines"] > drafts["machines"] > 1
    assert drafts["dollars_per_hour"] == 16 * drafts["machines"]
    for row in (plain, drafts):
        assert row["ttft_s"]["at_percentile"] <= 1 and row["tpot_s"]["at_percentile"] <= 0.04
        assert row["utilisation"] > 0.5
    assert main([*command, load.replace("40 ms", "4 ms")]) == 0
    assert "alone" in json.loads(capsys.readouterr().out)["fleet"]["rows"][0]["why"]
    assert main([*command, load, "--context", "5"]) == 2
    assert main([*command, load.replace("1500 in", "150000 in")]) == 2
    assert "up to 225,450 tokens" in capsys.readouterr().err
