"""`headstart gate`: checks on synthetic records, output files, and two servers of which one is faulty."""

import json
import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from headstart.cli.gate import gate as COMMAND
from headstart.cli.main import main
from headstart.errors import UsageError
from headstart.tools.gate import outputs
from headstart.tools.gate.run import (
    GateAnswer,
    GateCheck,
    GateOptions,
    GateRecord,
    chance_of_fewer,
    chance_of_more,
    compare,
    gate_prompts,
)
from headstart.tools.prompts import builtin_prompts

KINDS = ("short", "long", "schema", "tools")
VALID = json.dumps({"name": "a", "colour": "red", "numbers": [1, 2, 3], "story": "b"})
OPTIONS = GateOptions(old="old", new="new")


def record(seed: int, **changes: Any) -> GateRecord:
    """A record of 56 answers with about 2 tokens per pass and 100 tokens/s, each with `changes`."""
    drawn = random.Random(seed)
    answers = {}
    for number in range(56):
        kind = KINDS[number % 4]
        text = VALID if kind in ("schema", "tools") else f"text {number}"
        accepted = sum(drawn.random() < 0.5 for _ in range(64))
        seconds = 0.64 * drawn.uniform(0.9, 1.1)
        answer = GateAnswer(kind, number % 8 >= 4, (text, text), text, 64, seconds, float(accepted))
        answers[f"prompt {number}"] = replace(answer, **changes)
    return GateRecord("model", 64, 1, answers)


def failed_checks(old: GateRecord, new: GateRecord, options: GateOptions = OPTIONS) -> list[str]:
    return [check.name for check in compare(old, new, options) if check.ok is False]


@pytest.mark.parametrize("seed", range(20))
def test_equal_sides_pass(seed: int) -> None:
    assert failed_checks(record(seed), record(1000 + seed)) == []


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"texts": ("other", "other"), "company": "other"}, ["valid JSON", "valid arguments", "same text as"]),
        ({"company": "other"}, ["same text alone and in company"]),
        ({"accepted": 0.0}, [f"tokens per pass, {kind}" for kind in (*KINDS, "all")]),
        ({"seconds": 1.0}, ["speed, alone"]),
    ],
    ids=["another template", "batch variance", "dropped head", "slower"],
)
def test_each_fault_fails_its_checks(changes: dict[str, Any], names: list[str]) -> None:
    found = failed_checks(record(1), record(2, **changes))
    assert len(found) == len(names)
    assert all(each.startswith(name) for each, name in zip(found, names, strict=True))


def test_refused_requests_count_as_different_answers() -> None:
    """The new side answers tool requests with status 500."""
    refusal = {"texts": ("answers 500: x",) * 2, "company": "answers 500: x", "tokens": None, "refused": True}
    old, new = record(1), record(2)
    new = replace(new, answers={key: replace(each, **refusal) if each.kind == "tools" else each
                                for key, each in new.answers.items()})  # fmt: skip
    checks = {check.name: check for check in compare(old, new, OPTIONS)}
    assert [name for name, check in checks.items() if check.ok is False] == [
        "valid arguments of tool calls", "same text as the old side, greedy",
    ]  # fmt: skip
    assert checks["tokens per pass, tools"].note == "one side refused each of these requests"
    assert checks["tokens per pass, all"].ok


def test_inexact_old_side_excuses_text_differences() -> None:
    old = record(1, texts=("one", "other"), company="third")
    assert failed_checks(old, record(2, texts=("one", "fourth"), company="fifth")) == []


def test_timing_noise_passes() -> None:
    """16 answers a side with 40 % noise in time. With the limit "95 % interval below 1", 4 of these 100 runs failed."""

    def busy(seed: int) -> GateRecord:
        drawn, quiet = random.Random(seed), record(1)
        kept = list(quiet.answers.items())[:16]
        return replace(quiet, answers={key: replace(each, seconds=drawn.lognormvariate(0, 0.4)) for key, each in kept})

    assert sum(bool(failed_checks(busy(seed), busy(1000 + seed))) for seed in range(100)) < 2


def test_chance_of_more_is_the_binomial_tail() -> None:
    outcomes = [sum(each) for each in product((0, 1), repeat=9)]
    for slower in range(10):
        assert chance_of_more(slower, 9) == sum(each >= slower for each in outcomes) / len(outcomes)


def test_speeds_measured_at_different_times_are_not_checked() -> None:
    (check,) = [each for each in compare(record(1), record(2, seconds=1.0), OPTIONS, in_turns=False)
                if each.name == "speed, alone"]  # fmt: skip
    assert check.ok is None


def test_arguments_of_joined_tool_calls_are_validated_separately() -> None:
    """The client joins the arguments of several calls. Each must be complete JSON."""
    answer = next(iter(record(1).answers.values()))
    for text, valid in ((VALID + VALID, True), (f"{VALID}\n{VALID} ", True), (VALID + VALID[:-9], False),
                        (VALID + "{}", False), (VALID + " 5", False), ("", False)):  # fmt: skip
        assert replace(answer, texts=(text, "")).is_valid is valid


@pytest.mark.parametrize(("hits", "verdict"), [(0, None), (5, None), (6, False), (12, False)])
def test_loss_too_small_to_detect_is_not_checked(hits: int, verdict: bool | None) -> None:
    """Of 12 tool calls, `hits` are valid on the old side and none on the new one."""
    old, new = record(1), record(2)
    tools = [key for key, each in old.answers.items() if each.kind == "tools"][:12]
    old = replace(old, answers={key: replace(old.answers[key], texts=((VALID if number < hits else "{"),) * 2)
                                for number, key in enumerate(tools)})  # fmt: skip
    new = replace(new, answers={key: replace(new.answers[key], texts=("{", "{")) for key in tools})
    (check,) = [each for each in compare(old, new, OPTIONS) if each.name == "valid arguments of tool calls"]
    assert check.ok is verdict
    assert (check.note == "the old side has too few to notice a loss") is (verdict is None)


def test_text_changes_can_be_allowed() -> None:
    changed = {"texts": (VALID, VALID), "company": VALID}
    assert failed_checks(record(1), record(2, **changed)) == ["same text as the old side, greedy"]
    assert failed_checks(record(1), record(2, **changed), replace(OPTIONS, allow_text_changes=True)) == []


def test_chance_of_fewer_is_the_hypergeometric_tail() -> None:
    """Against an enumeration of all distributions of the hits."""
    old_hits, old_trials, new_hits, new_trials = 6, 7, 2, 6
    ways = list(combinations(range(old_trials + new_trials), old_hits + new_hits))
    fewer = sum(sum(place >= old_trials for place in way) <= new_hits for way in ways)
    assert chance_of_fewer(old_hits, old_trials, new_hits, new_trials) == pytest.approx(fewer / len(ways))


def test_baseline_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(record(1).data()))
    assert GateRecord.read(path) == record(1)
    path.write_text('{"format": "headstart gate 2", "answers": []}')
    with pytest.raises(UsageError, match="no baseline"):
        GateRecord.read(path)


def document(*checks: GateCheck) -> dict[str, Any]:
    sides = {name: {"side": f"./{name}", "model": name} for name in ("old", "new")}
    rows = [vars(check) for check in checks]
    return {"ok": True, **sides, "checks": rows, "summary": "PASSED", "max_tokens": 64, "record": {}}


def test_output_files_contain_the_checks() -> None:
    data = document(
        GateCheck("tokens per pass, short", True, "2.00", "1.90", kind="short", lengths=(2.0, 1.9)),
        GateCheck("tokens per pass, all", True, "2.00", "1.90", kind="all", lengths=(2.0, 1.9)),
        GateCheck('speed, "alone"', False, "1 <", "2", "slow & late"),
        GateCheck("valid JSON", None, "-", "-", "none"),
    )
    suite = ElementTree.fromstring(outputs.junit(data))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "1")
    assert [len(case) for case in suite] == [0, 0, 1, 1]
    assert "tokens per pass kept 95%" in outputs.badge(data)
    assert "short 1.90 (2.00)" in outputs.paragraph(data)
    assert "slow &amp; late" in outputs.page(data)


def test_prompts_of_runs_differ_in_an_early_word() -> None:
    """A cached prompt would change texts: llama.cpp wrote 9 of 56 texts differently with the prompt in its cache. The
    second word is a number drawn from the seed. A baseline keeps the seed."""
    assert gate_prompts(2, OPTIONS.seed) == gate_prompts(2, OPTIONS.seed)
    one, other = ([prompt.text.split()[1] for prompt in gate_prompts(2, seed)] for seed in (OPTIONS.seed, 1))
    assert len(set(one)) == len(one) - len(builtin_prompts()) + 1  # the built-in prompts share a number
    assert set(one).isdisjoint(other)
    assert GateOptions(old="", new="").seed != GateOptions(old="", new="").seed


def test_bad_sides_and_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server starts before all arguments are checked."""
    taken = tmp_path / "gate.xml"
    taken.touch()
    monkeypatch.delattr("subprocess.Popen")
    for words, message in (
        (["./nothing", "http://127.0.0.1:9"], "'./nothing' is no checkpoint"),
        (["qwen3_5-tiny", "./nothing"], "'./nothing' is no checkpoint"),
        (["http://127.0.0.1:9", "http://127.0.0.1:9"], "connection refused"),
        (["http://127.0.0.1:9", "http://127.0.0.1:9", "--junit", str(taken)], "exists"),
        (["missing.json", "http://127.0.0.1:9"], "cannot read missing.json"),
    ):
        assert main(["gate", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoint_without_its_head_fails_tokens_per_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped tiny model against a copy without MTP tensors has equal texts and fewer tokens per pass."""
    without = tmp_path / "without"
    assert main(["graft", "qwen3_5-tiny", "--strip", "--out", str(without)]) == 0
    capsys.readouterr()
    words = ["--max-tokens", "24", "--trials", "2", "--json", "--save", str(baseline := tmp_path / "baseline.json")]
    assert main(["gate", "qwen3_5-tiny", str(without), *words]) == 1
    data = json.loads(capsys.readouterr().out)
    wrong = [check["name"] for check in data["checks"] if check["ok"] is False]
    assert "tokens per pass, all" in wrong
    assert not [name for name in wrong if "same text" in name or "valid" in name]
    assert main(["gate", str(baseline), "qwen3_5-tiny"]) == 2  # before any prompt is sent
    assert f"is of model {without}, and qwen3_5-tiny serves qwen3_5-tiny" in capsys.readouterr().err.replace("\n", " ")


def test_github_action_uses_options_of_the_command() -> None:
    import yaml

    action = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text("utf-8"))
    line = action["runs"]["steps"][-1]["run"]
    flags = {word for word in line.split() if word.startswith("--")}
    known = {flag for item in COMMAND.options for flag in item.flags}
    assert line.startswith("headstart gate ")
    assert flags <= known
    assert set(action["inputs"]) == {"old", "new", "floor", "options"}
