"""benchmarks/gpu.py on a CPU: file parts, batched text generation, resumed training."""

import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from source import ROOT

torch = pytest.importorskip("torch")

from tiny_models import write_tiny  # noqa: E402

from headstart.api import LLM  # noqa: E402
from headstart.config import EngineConfig  # noqa: E402
from headstart.core import SamplingParams  # noqa: E402


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])


def test_split_files_are_joined_again(tmp_path: Path) -> None:
    from device import parts

    source, folder = tmp_path / "whole", tmp_path / "there"
    source.write_bytes(bytes(range(256)) * 40)
    made = parts.split(source, folder, "trunk", 3000)
    assert len(made) == 5
    last = made[-1].rename(tmp_path / made[-1].name)
    assert not parts.join([folder], "trunk", tmp_path / "back")
    assert parts.join([folder, tmp_path], "trunk", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    last.write_bytes(last.read_bytes()[::-1])
    with pytest.raises(ValueError, match="do not come to the file"):
        parts.join([folder, tmp_path], "trunk", tmp_path / "again")


def test_files_are_grouped_into_calls_by_size(tmp_path: Path) -> None:
    """Unpacking finds the files in numbered folders and outside them."""
    from device import parts

    sizes = {"a": 30, "b": 50, "c": 25, "d": 60, "e": 5}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    calls = parts.by_call([tmp_path / name for name in sizes], tmp_path, 80)
    assert [[path.name for path in paths] for paths in calls] == [["a", "b"], ["c"], ["d", "e"]]
    (tmp_path / "f").write_bytes(b"x")
    parts.unpack(tmp_path, tmp_path / "kept")
    parts.unpack(tmp_path / "2", tmp_path / "later")
    assert [{path.name for path in (tmp_path / name).iterdir()} for name in ("kept", "later")] == [{*sizes, "f"}, {"c"}]


def test_batched_writer_gives_the_engines_greedy_text(tmp_path: Path) -> None:
    """Six prompts of different lengths share three slots, so that slots are reused."""
    from device.writer import Job, Writer

    folder = write_tiny("llama", tmp_path / "model")
    llm = LLM(str(folder), EngineConfig(backend="reference", dtype="float64", threads=1, drafter="none"))
    prompts = [[3 + (7 * i + j) % 90 for j in range(1 + 3 * i)] for i in range(6)]
    writer = Writer(llm.model.decoder, sorted(llm.tokenizer.eos_ids), 3, 64, 1)
    jobs = deque(Job(tuple(ids), str(i), 0.0, 20) for i, ids in enumerate(prompts))
    found = {int(each.job.kind): each.tokens for each in writer.run(jobs, deque(), lambda _: None, lambda: False)}
    expected = llm.generate(prompts, SamplingParams(max_tokens=20, temperature=0.0))
    assert [found[i] for i in range(6)] == [each.token_ids for each in expected]


def test_goals_are_reported() -> None:
    from device.speed import goals

    row = {"shape": "a", "batch": 1, "tokens_a_pass": 1.0, "share": 0.61, "tokens_per_s": 100.0}
    drafted = {**row, "mode": "MTP", "tokens_a_pass": 2.6, "tokens_per_s": 179.0}
    lines = list(goals([{**row, "mode": "plain"}, drafted, {**drafted, "batch": 8}]))
    assert [line.rsplit(": ")[-1] for line in lines] == ["reached", "NOT reached"]
    assert "61% of the memory's limit" in lines[0] and "1.79 x plain" in lines[1]


@pytest.mark.slow
def test_interrupted_training_ends_with_the_same_head(tmp_path: Path) -> None:
    """Interrupted during text generation and between batches."""
    from device.clock import Clock, Results
    from device.heads import JointTraining, Plan

    folder = write_tiny("llama", tmp_path / "model", num_hidden_layers=1)
    plan = Plan(
        model=str(folder), device="cpu", dtype="float32", start="new", tokens=700, chunk=100, held_out=60, every=3,
        batch_tokens=256, slots=8, answer=12, draft_vocab=90, seed=1, kinds=("mtp",),
    )  # fmt: skip

    def make_training(name: str, clock: Any) -> Any:
        return JointTraining(plan, tmp_path / name, tmp_path / f"{name}-out", clock, Results(tmp_path / f"{name}.json"))

    class LimitedClock(Clock):
        """The time is over after `most` reads of `left`."""

        def __init__(self, most: float) -> None:
            super().__init__()
            self.looks = most

        @property
        def left(self) -> float:
            self.looks -= 1
            return self.looks

    whole = make_training("whole", Clock())
    assert whole.run()
    for most in (2, 30):
        assert not make_training("broken", LimitedClock(most)).run()
    broken = make_training("broken", Clock())
    assert broken.round_kept >= 1 and broken.state.exists() and broken.run()
    ours, theirs = (each.heads[0].trainer for each in (whole, broken))
    assert ours.progress.step == theirs.progress.step > 2
    for name, weight in ours.masters.items():
        assert torch.equal(weight, theirs.masters[name]), name
    assert any(not torch.equal(weight, ours.average[name]) for name, weight in ours.masters.items()), "all are equal"
