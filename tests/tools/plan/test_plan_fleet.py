"""Simulation of disaggregated prefill and decode, and its report in `plan --fleet`."""

import json

import numpy as np
import pytest

from headstart.cli.main import main
from headstart.tools.plan import fleet
from headstart.tools.plan.fleet import EngineLimits, simulate_disaggregated, transfer_ends
from headstart.tools.plan.simulate import Arrivals, PrefillRows, poisson_arrivals, simulate

LONG, SHORT = "4 req/s, 8000 in, 200 out, TTFT 2 s, TPOT 8 ms", "40 req/s, 60 in, 300 out, TTFT 1 s, TPOT 10 ms"


def step(decoding: int, context: float, read: PrefillRows) -> tuple[float, float]:
    """A decode step takes 0.1 s, a row of a prompt 0.01 s."""
    return 0.1 * bool(decoding) + 0.01 * read.rows, 1.0


def test_request_is_prefilled_transferred_and_decoded() -> None:
    """Two simultaneous requests take 1 s each to prefill and 0.5 s each on one link. The decode server computes the
    last row of each prompt."""
    asked = Arrivals(times=np.array([0.0, 0.0]), prompts=np.array([100.0, 100.0]), outputs=np.array([5.0, 5.0]))
    side = EngineLimits(step=step, slots=8, rows=100)
    found = simulate_disaggregated(asked, np.array([0.5, 0.5]), side, side, num_prefill=1, num_decode=1)
    assert found.result.ttft_s == pytest.approx([1 + 0.5 + 0.01, 2 + 0.5 + 0.01], abs=0.11)
    assert found.result.ttft_s[0] == pytest.approx(1.51)
    assert found.result.tpot_s == pytest.approx([0.1, 0.1], abs=0.003)
    slow = simulate_disaggregated(asked, np.array([3.0, 3.0]), side, side, num_prefill=1, num_decode=1)
    assert slow.result.ttft_s == pytest.approx([4.01, 7.01])  # the second waits for the link
    assert list(transfer_ends(np.array([0.0, 0.0, 0.0]), np.full(3, 2.0), links=2)) == [2.0, 2.0, 4.0]


def test_latency_scales_with_load_per_machine() -> None:
    """16 + 16 machines at twice the request rate have the latency of 8 + 8."""
    side, seconds = EngineLimits(step=step, slots=64, rows=200), np.full(2000, 0.02)
    asked = [poisson_arrivals(rate, 50, 20, 2000) for rate in (10, 20)]
    few = simulate_disaggregated(asked[0], seconds, side, side, num_prefill=8, num_decode=8)
    many = simulate_disaggregated(asked[1], seconds, side, side, num_prefill=16, num_decode=16)
    assert np.mean(many.result.ttft_s) == pytest.approx(np.mean(few.result.ttft_s), rel=0.1)
    assert np.mean(many.result.tpot_s) == pytest.approx(np.mean(few.result.tpot_s), rel=0.1)
    assert many.prefill_busy == pytest.approx(few.prefill_busy, rel=0.1)


def test_long_prompts_slow_down_decoding_on_shared_machines() -> None:
    asked = poisson_arrivals(0.5, 100, 20, 600)
    side = EngineLimits(step=step, slots=64, rows=1000)
    whole = simulate(step, asked, engines=2, slots=64, rows=1000)
    apart = simulate_disaggregated(asked, np.full(600, 0.1), side, side, num_prefill=1, num_decode=1)
    assert np.mean(whole.tpot_s) > 1.2 * np.mean(apart.result.tpot_s)
    assert np.mean(whole.ttft_s) < np.mean(apart.result.ttft_s)


@pytest.mark.slow
def test_plan_reports_whether_disaggregation_pays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disaggregation pays for long prompts with a tight TPOT. It does not for short prompts or over a slow network."""
    monkeypatch.setattr(fleet, "MAX_DISAGGREGATED_REQUESTS", 600)
    monkeypatch.setattr(fleet, "MAX_REQUESTS", 600)
    command = ["plan", "mimo-7b", "--drafter", "none", "--gpu", "h200", "--fleet"]
    found = []
    for load in (LONG, f"{LONG}, 2 Gbit/s"):
        assert main([*command, load, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["fleet"]["disaggregation"])
    long, slow = found
    assert long["pays"]
    split = long["disaggregated"]
    assert split["num_prefill"] + split["num_decode"] < long["colocated"]["machines"]
    assert split["tpot_s"] < 0.008 and split["ttft_s"] < 2 and not slow["pays"]
    assert long["step_s"]["with_a_prompt"] > 10 * long["step_s"]["alone"]
    assert slow["transfer"]["seconds"] == pytest.approx(50 * long["transfer"]["seconds"])
    assert main([*command, SHORT]) == 0 and "apart    does not pay: " in capsys.readouterr().out
