"""Prompts and tokens on machines of their own, simulated: request by request, and as `plan --fleet` says it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headstart.cli.main import main
from headstart.tools.plan.apart import Side, handed_over, together
from headstart.tools.plan.simulate import Arrivals, Read, arrivals, simulate

LONG, SHORT = "4 req/s, 8000 in, 200 out, TTFT 2 s, TPOT 8 ms", "40 req/s, 60 in, 300 out, TTFT 1 s, TPOT 10 ms"


def step(decoding: int, context: float, read: Read) -> tuple[float, float]:
    """A token takes 0.1 s, a row of a prompt 0.01 s."""
    return 0.1 * bool(decoding) + 0.01 * read.rows, 1.0


def test_a_prompt_is_read_handed_over_and_answered() -> None:
    """Two at once, a second each to read; one link, half a second each; there a row of a second one is read while the
    first one's answer is written."""
    asked = Arrivals(times=np.array([0.0, 0.0]), prompts=np.array([100.0, 100.0]), outputs=np.array([5.0, 5.0]))
    side = Side(step=step, slots=8, rows=100)
    found = together(asked, np.array([0.5, 0.5]), side, side, prompts=1, tokens=1)
    assert found.served.ttft_s == pytest.approx([1 + 0.5 + 0.01, 2 + 0.5 + 0.01], abs=0.11)
    assert found.served.ttft_s[0] == pytest.approx(1.51)
    assert found.served.tpot_s == pytest.approx([0.1, 0.1], abs=0.003)
    slow = together(asked, np.array([3.0, 3.0]), side, side, prompts=1, tokens=1)
    assert slow.served.ttft_s == pytest.approx([4.01, 7.01])  # they wait for the link
    assert list(handed_over(np.array([0.0, 0.0, 0.0]), np.full(3, 2.0), links=2)) == [2.0, 2.0, 4.0]


def test_many_machines_are_as_their_share() -> None:
    """16 and 16 with twice the requests of 8 and 8 serve as well."""
    side, seconds = Side(step=step, slots=64, rows=200), np.full(4000, 0.02)
    few, many = (
        together(arrivals(rate, 50, 20, 4000), seconds, side, side, prompts=count, tokens=count)
        for rate, count in ((10, 8), (20, 16))
    )
    assert np.mean(many.served.ttft_s) == pytest.approx(np.mean(few.served.ttft_s), rel=0.1)
    assert np.mean(many.served.tpot_s) == pytest.approx(np.mean(few.served.tpot_s), rel=0.1)
    assert many.prompts_busy == pytest.approx(few.prompts_busy, rel=0.1)


def test_long_prompts_hold_up_answers_where_both_are_on_one_machine() -> None:
    asked = arrivals(0.5, 100, 20, 600)
    side = Side(step=step, slots=64, rows=1000)
    whole = simulate(step, asked, engines=2, slots=64, rows=1000)
    apart = together(asked, np.full(600, 0.1), side, side, prompts=1, tokens=1)
    assert np.mean(whole.tpot_s) > 1.2 * np.mean(apart.served.tpot_s)
    assert np.mean(whole.ttft_s) < np.mean(apart.served.ttft_s)


def test_plan_says_when_it_pays(capsys: pytest.CaptureFixture[str]) -> None:
    """Long prompts and little time for a token: apart; short ones: not, and not over a slow network either."""
    command = ["plan", "mimo-7b", "--drafter", "none", "--gpu", "h200", "--fleet"]
    found = []
    for load in (LONG, f"{LONG}, 2 Gbit/s"):
        assert main([*command, load, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["fleet"]["apart"])
    long, slow = found
    assert long["pays"] and long["apart"]["prompts"] + long["apart"]["tokens"] < long["whole"]["machines"]
    assert long["apart"]["tpot_s"] < 0.008 and long["apart"]["ttft_s"] < 2
    assert not slow["pays"]
    assert long["step_s"]["with_a_prompt"] > 10 * long["step_s"]["alone"]
    assert slow["handed_over"]["seconds"] == pytest.approx(50 * long["handed_over"]["seconds"])
    assert main([*command, SHORT]) == 0
    assert "apart    does not pay: " in capsys.readouterr().out
