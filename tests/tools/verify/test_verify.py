"""`headstart verify` reports no difference for a correct engine, and every difference of a faulty one."""

import json
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from lora_files import random_adapter
from support import family_of, make, new_folder, new_sequence, prompt_of, request, run, soften, tiny_model
from tiny_models import write_model, write_tiny

from headstart import machine
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.core import SamplingParams, Span, VerifyResult
from headstart.engine.load import load_model
from headstart.engine.verify import verify_exact
from headstart.errors import ModelError, UsageError
from headstart.kernels.backends import reference
from headstart.tools.verify import run as verify
from headstart.tools.verify.options import FULL, VerifyOptions, default_drafters, pairwise
from headstart.tools.verify.references import TIE, TieChecker

FAMILY = "mimo"
PROMPTS = ("the thing", "an inner ring and the other thing, then nothing", "x")
GRID: dict[str, Any] = {
    "temperatures": (0.0, 0.7, 1.5), "depths": (0, 1, 3, 5), "drafters": ("mtp", "ngram"), "batch_sizes": (1, 4, 16),
    "chunk_sizes": (1, 37, 512), "prefix_caching": (True, False), "preemption": (True, False),
}  # fmt: skip
SMALL_GRID: dict[str, Any] = {
    "temperatures": (0.0, 1.0), "depths": (3,), "drafters": ("mtp",), "batch_sizes": (8,), "chunk_sizes": (32, 512),
    "prefix_caching": (True, False), "preemption": (False,),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder() -> Path:
    config, arrays = family_of(FAMILY).tiny(num_hidden_layers=2)
    return write_model(new_folder(), config, soften(arrays, 0.3))


def options(folder: Path, grid: dict[str, Any] = SMALL_GRID, dtype: str = "float64", **changes: Any) -> Any:
    config = EngineConfig(backend="reference", dtype=dtype, threads=1, kv_blocks=40)
    common = {"model": str(folder), "config": config, "prompts": PROMPTS, "max_tokens": 16}
    return VerifyOptions(**{**common, **grid, **changes})


@pytest.mark.slow
def test_whole_grid_has_no_difference(folder: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    report = verify.run(options(folder, GRID), lambda *call: calls.append(call))
    data = report.data
    assert report.ok and (data["differences"], data["ties"], data["found"]) == (0, 0, [])
    assert data["identical"] == data["texts"] == len(data["cells"]) * len(PROMPTS)
    assert data["tokens"] > data["texts"] * 10
    assert max(cell["acceptance_length"] for cell in data["cells"]) > 1.2, "drafts were accepted"
    assert [done for done, _, _ in calls] == list(range(1, len(calls) + 1))
    assert {total for _, total, _ in calls} == {len(calls)}
    assert data["preemptions"] == sum(cell["preemptions"] for cell in data["cells"]) > 0
    assert not any(cell["preemptions"] for cell in data["cells"] if not cell["preemption"] or cell["batch"] == 1)
    assert f"{data['preemptions']} preemptions, in " in report.lines[-3]
    assert report.lines[-3].startswith("sampling seeds 0; seed of the grid 0; ")
    assert report.lines[-2].startswith(f"identical {data['texts']}/{data['texts']} texts")
    assert "float64" in report.lines[-1]
    json.dumps(data, allow_nan=False)


@pytest.mark.slow
def test_grid_with_a_draft_model(folder: Path) -> None:
    """A draft model named by the user may be as large as the trunk."""
    asked = options(folder, drafters=("draft_model",))
    report = verify.run(replace(asked, config=replace(asked.config, head=str(folder))))
    assert report.ok and max(cell["acceptance_length"] for cell in report.data["cells"]) > 2


def test_long_prompts_are_in_cells_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only these cells find a fault of contexts above 512 tokens."""
    pytest.importorskip("headstart.kernels.native._native", exc_type=ImportError)
    model, arrays = family_of(FAMILY).tiny(num_hidden_layers=2, max_position_embeddings=1024)
    longer, config = write_model(new_folder(), model, arrays), EngineConfig(backend="native", threads=2, kv_blocks=120)
    asked = options(longer, config=config, max_tokens=8, long_lengths=(9999, 530, 520))
    report = verify.run(asked)
    assert report.ok and report.data["prompts"] == len(PROMPTS) + 2
    long = [cell for cell in report.data["cells"] if cell["prompts"] == 2]
    assert {cell["depth"] for cell in long} == {1, "auto"} and {cell["batch"] for cell in long} == {2}
    assert report.data["texts"] == sum(cell["prompts"] for cell in report.data["cells"])

    from headstart.engine.engine import Engine

    original = Engine._append

    def short(self: Engine, sequence: Any, result: Any) -> int:
        taken = original(self, sequence, result)
        if self.drafting.drafter and len(sequence.tokens) > 522 and not sequence.finish_reason:
            sequence.finish_reason = "stop"
        return taken

    monkeypatch.setattr(Engine, "_append", short)
    assert {each["prompt"] for each in verify.run(asked).data["found"]} == {3, 4}


@pytest.mark.slow
def test_one_prompt_gives_no_preemption_cells(folder: Path) -> None:
    report = verify.run(options(folder, prompts=PROMPTS[:1]))
    assert report.ok and "no cell in which sequences could preempt each other" in report.lines[-3]


def wrong_verify(draft: list[int], targets: list[int], *logprobs: Any) -> VerifyResult:
    """Accepts the first drafted token always."""
    if draft and draft[0] != targets[0]:
        return VerifyResult((draft[0],), len(draft), 1)
    return verify_exact(draft, targets, *logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_accepting_a_wrong_draft_is_found(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.engine.verify.verify_exact", wrong_verify)
    report = verify.run(options(folder, dtype=dtype))
    assert not report.ok and report.data["differences"] > len(PROMPTS)
    assert report.data["identical"] + len(report.data["found"]) == report.data["texts"]
    wrong = [each for each in report.data["found"] if not each["tie"]]
    assert len(wrong) == report.data["differences"]
    assert all(each["plain"] != each["other"] and each["margin"] > TIE for each in wrong if each["margin"])
    assert any("DIFFERENT" in line for line in report.lines)


@pytest.mark.slow
def test_truncated_text_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is a prefix of the other is a difference and no tie."""
    from headstart.engine.engine import Engine

    original = Engine._append

    def short(self: Engine, sequence: Any, tokens: Any) -> int:
        taken = original(self, sequence, tokens)
        if self.drafting.drafter and sequence.num_output > 9 and not sequence.finish_reason:
            sequence.finish_reason = "stop"
        return taken

    monkeypatch.setattr(Engine, "_append", short)
    report = verify.run(options(folder))
    assert not report.ok and {each["margin"] for each in report.data["found"]} == {None}
    assert any("one text ends there" in line for line in report.lines)
    json.dumps(report.data, allow_nan=False)


@pytest.mark.slow
def test_wrong_prefix_cache_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block keys without the parent's key."""
    from headstart.cache.blocks import block_key

    monkeypatch.setattr("headstart.cache.blocks.block_key", lambda parent, tokens: block_key(b"", tokens))
    common = prompt_of(16, 0)
    prompts = tuple([*prompt_of(16, seed), *common, *common, 5] for seed in range(1, 4))
    assert not verify.run(options(folder, prompts=prompts, prefix_caching=(True,))).ok
    assert verify.run(options(folder, prompts=prompts, prefix_caching=(False,))).ok


@pytest.mark.slow
def test_exit_codes_of_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the thing\nx\n")
    command = [
        "verify", str(folder), "--dtype", "float64", "--threads", "1", "--kv-blocks", "40", "--max-tokens", "12",
        "--prompts", str(prompts), "--temperatures", "0,1", "--depths", "2", "--drafters", "mtp", "--json",
        "--preemption", "off", "--chunk-sizes", "1, 32, 32",
    ]  # fmt: skip
    assert main(command) == 0
    data = json.loads(capsys.readouterr().out)
    cells = {(cell["chunk"], cell["threads"], cell["preemption"]) for cell in data["cells"]}
    assert data["ok"] is True and cells == {(1, 1, False), (32, 1, False)}
    monkeypatch.setattr("headstart.engine.verify.verify_exact", wrong_verify)
    assert main(command) == 1 and json.loads(capsys.readouterr().out)["differences"] > 0


def test_unverifiable_models_are_refused_before_work(folder: Path, tmp_path: Path) -> None:
    calls: list[Any] = []
    with pytest.raises(UsageError, match="--rule rejection promises the same distribution"):
        verify.run(options(folder, config=EngineConfig(rule="rejection")), lambda *call: calls.append(call))
    headless = write_model(tmp_path / "headless", *family_of(FAMILY).tiny(num_nextn_predict_layers=0))
    with pytest.raises(UsageError, match="the model has no MTP head"):
        verify.run(options(headless, GRID), lambda *call: calls.append(call))
    assert not calls


@pytest.mark.parametrize(("flags", "message"), [
    (["--threads", "1", "--thread-counts", "1,2"], "--threads and --thread-counts are both given"),
    (["--numerics", "--against", "transformers"], "--numerics and --against are both given"),
    (["--numerics", "--full"], "--numerics and --full are both given"),
    (["--numerics", "--depths", "1,3"], "--depths has no meaning with --numerics"),
    (["--against", "transformers", "--temperatures", "0.7"], "--temperatures has no meaning with --against"),
    (["--preemption", "maybe"], "--preemption is 'maybe', which is not a list of such values"),
    (["--depth", "3"], "verify varies --depth"),
    *((["--" + name, "0,1"], f"--{name} is '0,1', but must be at least 1")
      for name in ("batch-sizes", "chunk-sizes", "thread-counts")),
    (["--temperatures", "-1"], "temperature is -1.0"),
])  # fmt: skip
def test_contradicting_options_are_refused(
    folder: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folder), *flags]) == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_preemption_cells_preempt(folder: Path) -> None:
    """In every preemption cell, at each depth, with prompts of very different lengths."""
    grid = {**SMALL_GRID, "depths": (0, 3), "batch_sizes": (4, 16), "preemption": (True,)}
    prompts = tuple(prompt_of(length, i) for i, length in enumerate((5, 60, 9, 14, 21, 3)))
    report = verify.run(options(folder, grid, prompts=prompts, max_tokens=40))
    assert report.ok and all(cell["preemptions"] for cell in report.data["cells"])


# Threads.


@pytest.mark.slow
def test_a_model_is_loaded_for_each_thread_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, original = [], verify.load_model

    def load(name: str, config: EngineConfig) -> Any:
        loaded.append(config.threads)
        return original(name, config)

    monkeypatch.setattr(verify, "load_model", load)
    report = verify.run(options(folder, thread_counts=(2, 1), prompts=PROMPTS[:1], max_tokens=4))
    threads = [cell["threads"] for cell in report.data["cells"]]
    assert report.ok and loaded == [2, 1] and threads == sorted(threads, reverse=True)


def test_thread_counts_by_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "threads", lambda: machine.Threads(8, 6, None))
    assert verify.default_threads(EngineConfig(), exact=False) == (6,)
    assert verify.default_threads(EngineConfig(), exact=True) == (1, 2)
    assert verify.default_threads(EngineConfig(threads=3), exact=True) == (3,)
    monkeypatch.setattr(machine, "threads", lambda: machine.Threads(8, 6, 1.5))
    assert verify.default_threads(EngineConfig(), exact=True) == (1,)


@pytest.mark.slow
def test_exact_backend_has_no_ties(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its differences have no margin, as float64 scores differ from its arithmetic."""
    monkeypatch.setattr(reference, "BACKEND", replace(reference.BACKEND, exact=True))
    monkeypatch.setattr("headstart.engine.verify.verify_exact", wrong_verify)
    monkeypatch.setattr("headstart.tools.verify.run.TIE", 1e9)
    report = verify.run(options(folder, dtype="float32"))
    assert not report.ok and report.data["ties"] == 0 and {each["margin"] for each in report.data["found"]} == {None}
    assert any(each["plain"] >= 0 for each in report.data["found"]) and "up to numeric ties" not in report.lines[-1]


# Ties.


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_margin_is_the_difference_of_two_scores(temperature: float) -> None:
    model = tiny_model(FAMILY)
    context, params = prompt_of(20, 0), SamplingParams(temperature=temperature, seed=5)
    engine = make(model, drafter="none")
    logits = engine.runner.forward([Span(new_sequence(engine, context), 0, len(context), 1)]).logits[0].numpy()
    best, second = np.argsort(-logits)[:2]
    tie_checker = TieChecker(str(model.checkpoint.path), EngineConfig(threads=1))
    margin, tie = tie_checker.margin(context, int(best), int(second), params)
    assert not tie
    if temperature == 0:
        assert margin == pytest.approx(logits[best] - logits[second], abs=1e-5)
    else:
        asked = request(context, temperature=temperature, seed=5, max_tokens=1)
        drawn = run(make(model, drafter="none"), [asked])["r", 0].tokens[0]
        gaps = [tie_checker.margin(context, drawn, token, params)[0] for token in range(3, 12) if token != drawn]
        assert min(gaps) > 0 and len({round(gap, 6) for gap in gaps}) == len(gaps)


def test_equal_scores_are_a_tie(tmp_path: Path) -> None:
    """Two tokens with the same LM head row have the same logit."""
    config, arrays = family_of(FAMILY).tiny(num_hidden_layers=1, tie_word_embeddings=False)
    arrays["lm_head.weight"][77] = arrays["lm_head.weight"][33]
    model = str(write_model(tmp_path / "twins", config, arrays))
    for tolerance, expected in ((TIE, True), (0.0, False)):
        margin, tie = TieChecker(model, EngineConfig(threads=1), tolerance).margin([5, 6], 33, 77, SamplingParams())
        assert margin == pytest.approx(0, abs=1e-6) and tie is expected


@pytest.mark.slow
def test_float64_has_no_ties(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tie in float32 is a difference in float64."""
    monkeypatch.setattr("headstart.engine.verify.verify_exact", wrong_verify)
    monkeypatch.setattr("headstart.tools.verify.run.TIE", 1e9)
    report = verify.run(options(folder, dtype="float32"))
    assert report.ok and report.data["ties"] == report.data["texts"] - report.data["identical"] > 0
    assert not verify.run(options(folder, dtype="float64")).ok


def test_margin_at_the_end_of_the_context() -> None:
    tie_checker = TieChecker(str(tiny_model(FAMILY).checkpoint.path), EngineConfig(threads=1, max_model_len=64))
    margin, _ = tie_checker.margin(prompt_of(63, 0), 5, 6, SamplingParams())
    assert 0 < margin < 50


# Covering arrays.


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 3))
@settings(max_examples=40)
def test_pairwise_covers_all_pairs_of_levels(sizes: list[int], seed: int) -> None:
    factors = {f"f{i}": [f"{i}.{level}" for level in range(size)] for i, size in enumerate(sizes)}
    cells = pairwise(factors, seed)
    assert all(cell.keys() == factors.keys() for cell in cells)
    for one, other in combinations(factors, 2):
        assert {(cell[one], cell[other]) for cell in cells} == set(product(factors[one], factors[other]))
    if len(sizes) == 1:
        assert [cell["f0"] for cell in cells] == factors["f0"]
    assert len(cells) <= np.prod(sizes) and len({tuple(cell.values()) for cell in cells}) == len(cells)


@pytest.mark.slow
def test_default_grid_is_small() -> None:
    """It has every drafter of the default model at every depth."""
    model = load_model(None, EngineConfig(threads=1))
    drafters = default_drafters(model, EngineConfig())
    assert drafters == ("eagle3", "ngram", "mixed", "mtp")
    assert len(pairwise(VerifyOptions(drafters=drafters, thread_counts=(1,)).factors())) <= 26
    assert len(pairwise(VerifyOptions(drafters=drafters, thread_counts=(1, 2)).factors())) <= 31
    assert default_drafters(model, EngineConfig(head="mtp")) == ("eagle3", "ngram", "mixed")
    assert default_drafters(replace(model, head=None), EngineConfig()) == ("ngram",)


@pytest.mark.slow
def test_full_grid_compares_2000_texts() -> None:
    full = VerifyOptions(**FULL, thread_counts=(1, 2))
    assert (full.min_texts, full.max_tokens) == (2000, 64)
    factors = full.factors()
    cells = pairwise(factors, at_least=250)
    assert len(cells) == len({tuple(cell.values()) for cell in cells}) == 250 and cells[:28] == pairwise(factors)[:28]
    for one, other in combinations(factors, 2):
        assert len({(cell[one], cell[other]) for cell in cells}) == len(factors[one]) * len(factors[other])


def test_pairwise_is_limited_by_the_combinations_and_stays_small() -> None:
    assert len(pairwise({"a": (1, 2), "b": (1, 2, 3)}, at_least=99)) == 6
    assert len(pairwise({"a": (1, 2)}, at_least=99)) == 2
    factors = {f"f{i}": range(4) for i in range(8)}  # 65536 cells
    cells = pairwise(factors)
    assert len(cells) < 50
    for one, other in combinations(factors, 2):
        assert len({(cell[one], cell[other]) for cell in cells}) == 16


def test_min_texts_adds_cells(folder: Path) -> None:
    report = verify.run(options(folder, {**SMALL_GRID, "depths": (1, 2)}, min_texts=21, max_tokens=4))
    assert report.data["texts"] == 21


def test_cells_are_chosen_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the drafters come from the model."""
    made: list[int] = []
    monkeypatch.setattr(verify, "pairwise", lambda *grid: made.append(1) or pairwise(*grid))
    few = {"drafters": (), "depths": (1,), "chunk_sizes": (512,), "temperatures": (0.0,)}
    assert verify.run(options(folder, {**SMALL_GRID, **few}, prompts=PROMPTS[:1], max_tokens=2)).ok and len(made) == 1


def test_margins_use_the_adapter() -> None:
    path, params = tiny_model(FAMILY).checkpoint.path, SamplingParams(temperature=0)
    config = EngineConfig(threads=1, lora=(f"one={random_adapter(path, 1)}",))
    plain = TieChecker(str(path), EngineConfig(threads=1)).margin([5, 6], 33, 77, params)
    tie_checker = TieChecker(str(path), config)
    assert tie_checker.margin([5, 6], 33, 77, params) == plain != tie_checker.margin([5, 6], 33, 77, params, "one")
    with pytest.raises(UsageError, match="--lora does not go with --against transformers"):
        verify.run(VerifyOptions(model=str(path), config=config, against="transformers"))


def test_model_with_custom_code_is_refused_for_transformers(tmp_path: Path) -> None:
    folder = write_tiny(FAMILY, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    own = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    (folder / "own.py").write_text("raise SystemExit")
    with pytest.raises(ModelError, match=r"transformers cannot load .*custom code"):
        verify.run(VerifyOptions(model=str(folder), against="transformers"))
