"""Calibration: its time limit, and stored costs that later starts reuse or measure again."""

import itertools
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import SMALL, headed_model
from tiny_models import write_model

from headstart import hub, registry
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.engine import calibrate
from headstart.engine.calibrate import MAX_SECONDS, known_costs
from headstart.engine.engine import Engine
from headstart.noise import NoiseCheck


@pytest.fixture
def engine() -> Engine:
    return LLM(headed_model("mimo"), EngineConfig(**SMALL, depth=3)).engine


def test_head_that_drafts_no_token_is_calibrated(tmp_path: Path) -> None:
    """Of a head whose logits are not finite."""
    config, arrays = registry.find("models", "mimo").FAMILY.tiny()
    broken = {name: array * np.nan if "mtp_layers" in name else array for name, array in arrays.items()}
    found = [
        LLM(str(write_model(tmp_path / name, config, each)), EngineConfig(**SMALL, depth="auto")).generate(["the"])[0]
        for name, each in {"whole": arrays, "broken": broken}.items()
    ]
    assert found[0].token_ids == found[1].token_ids


class SimulatedClock:
    """Replaces the clock: a pass takes `base` seconds plus `row` for each row, times the next factor of `load`
    (cycled). A draft step takes `draft` seconds, by default as long as a row. Threads wait for a processor during
    the share `waiting` of the time."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, base: float, row: float, *load: float) -> None:
        self.now, self.passes, self.waiting = 0.0, 0, 0.0
        self.base, self.row, self.draft, self.load = base, row, row, itertools.cycle(load or (1.0,))
        original = engine.runner.forward

        def forward(spans: Any) -> Any:
            rows = sum(span.num_rows for span in spans)
            self.now += (self.base + self.row * rows) * next(self.load)
            self.passes += 1
            return original(spans)

        drafter = engine.drafting.drafter
        propose = drafter.propose

        def timed_propose(requests: Any) -> None:
            self.now += self.draft * max([request.depth for request in requests])
            propose(requests)

        monkeypatch.setattr(drafter, "propose", timed_propose)
        monkeypatch.setattr(engine.runner, "forward", forward)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(calibrate, "check_noise", lambda _: nullcontext(NoiseCheck(self.waiting)))


@pytest.mark.slow
@pytest.mark.parametrize("base", [0.001, 0.05, 1.0])
def test_calibration_keeps_its_time_limit(base: float, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceptions are the one required measurement and the pass that runs when the time is over."""
    timed = SimulatedClock(engine, monkeypatch, base, base / 100)
    costs = calibrate.calibrate(engine)
    first = 3 * base + 30 * base / 100  # a prompt, a warm-up, a step
    assert timed.now < max(MAX_SECONDS, first) + 2 * base and costs.passes.at(1) == pytest.approx(1.01 * base)
    assert costs.passes.at(4) == pytest.approx(1.04 * base, rel=0.2) and not costs.busy and not engine.has_work


@pytest.mark.slow
def test_temporary_slowdown_affects_all_row_counts_alike(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    SimulatedClock(engine, monkeypatch, 0.004, 0.0002, *[1.0] * 20, *[3.0] * 20)
    costs = calibrate.calibrate(engine)
    assert [costs.passes.at(rows) for rows in (1, 2, 4)] == pytest.approx([0.0042, 0.0044, 0.0048])


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3, 5, 8, 9, 33, 96])
def test_calibration_with_a_pool_of_one_short_sequence(length: int) -> None:
    """Sequences of fewer than 8 tokens are too short to measure: engines without calibration still generate."""
    small = {**SMALL, "max_model_len": length, "max_num_seqs": 1, "kv_blocks": -(-length // 8)}
    if length >= 8:
        assert calibrate.calibrate(LLM(headed_model("mimo"), EngineConfig(**small, depth=3)).engine).passes.at(1) > 0
    assert 0 < len(LLM(headed_model("mimo"), EngineConfig(**small)).generate([[5]])[0].token_ids) <= length - 1


@pytest.mark.slow
def test_stored_costs_are_used_on_a_busy_machine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path)
    facts = {"test": 1}

    def passes_until_known(*load: float) -> int:
        """Passes until the costs are known."""
        with monkeypatch.context() as patch:
            timed = SimulatedClock(engine, patch, 0.004, 0.001, *load)
            known_costs(engine, facts)
            return timed.passes

    def stored_document() -> Any:
        [file] = tmp_path.rglob("*.json")
        return json.loads(file.read_text())

    assert passes_until_known() > 50
    assert 10 < passes_until_known(1, 3, 2, 4, 5, 2) < 30, "noise does not replace the stored costs"
    assert not stored_document()["confirmed"] and 10 < passes_until_known() < 30 and stored_document()["confirmed"]
    assert passes_until_known() == 0, "confirmed costs are not measured again"


@pytest.mark.slow
def test_pass_costs_not_confirmed_by_second_start_are_measured_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path)
    for row, passes in ((0.001, 50), (0.0001, 50), (0.0001, 10)):  # four rows: 1.6 times one, then 1.07
        with monkeypatch.context() as patch:
            timed = SimulatedClock(engine, patch, 0.004, row)
            costs = known_costs(engine, {"test": 2})
            assert timed.passes > passes
    assert timed.passes < 30 and costs.passes.at(4) / costs.passes.at(1) == pytest.approx(44 / 41, rel=0.01)


@pytest.mark.slow
def test_draft_costs_not_confirmed_by_second_start_are_measured_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path)
    for draft in (0.003, 0.001, 0.001):
        with monkeypatch.context() as patch:
            timed = SimulatedClock(engine, patch, 0.004, 0.001)
            timed.draft = draft
            costs = known_costs(engine, {"test": 4})
            assert costs.drafts.at(1) == pytest.approx(draft, rel=0.1)
    assert timed.passes < 30


@pytest.mark.slow
def test_costs_stored_under_overload_are_measured_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The stored passes are ten times slower, in the same ratio."""
    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path)
    for pass_s, row_s in ((0.04, 0.002), (0.004, 0.0002)):
        with monkeypatch.context() as patch:
            SimulatedClock(engine, patch, pass_s, row_s)
            costs = known_costs(engine, {"test": 3})
    assert costs.passes.at(1) == pytest.approx(0.0042, rel=0.05)


@pytest.mark.slow
def test_costs_measured_beside_a_busy_process_are_measured_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The other process slows all steps equally, so only its CPU time shows it."""
    monkeypatch.setattr(hub, "cache_dir", lambda: tmp_path)
    for waiting, row, slower in ((0.25, 0.0005, 5), (0.25, 0.0005, 5), (0.0, 0.0004, 4), (0.0, 0.0004, 4)):
        with monkeypatch.context() as patch:
            timed = SimulatedClock(engine, patch, 0.004, row)
            timed.waiting = waiting
            costs = known_costs(engine, {"test": 5})
            assert costs.passes.at(4) / costs.passes.at(1) == pytest.approx((40 + 4 * slower) / (40 + slower), rel=0.01)
    [file] = tmp_path.rglob("*.json")
    assert json.loads(file.read_text())["confirmed"]
