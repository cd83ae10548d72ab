"""KV spill: blocks in files are reused by later engines, with the same texts and logprobs."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support
from tiny_models import write_model

from headstart.cache.store import BlockStore
from headstart.config import AUTO, EngineConfig
from headstart.core import Request
from headstart.engine.build import change_head
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.errors import UsageError

FAMILIES = ("llama", "qwen3_5", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gemma3", "gpt_oss", "falcon_h1")
"""Attention, recurrent states, latent, indexed and compressed keys, windows, sinks, both kinds of mixers at once."""
LONG: dict[str, Any] = {"max_model_len": 400, "kv_blocks": 120, "max_num_batched_tokens": 64}


def long_request(prompt: list[int], name: str = "r", **params: Any) -> Request:
    return support.request(prompt, name=name, stops=(), **{"max_tokens": 10, "logprobs": 2, **params})


def engine_of(model: Model, folder: Path | None, **settings: Any) -> Engine:
    spill = {} if folder is None else {"kv_spill": str(folder)}
    return support.make(model, **{**LONG, **spill, **settings})


def outputs_and_rows(engine: Engine, *requests: Request) -> tuple[support.Outputs, int]:
    """Outputs of the requests, and the number of rows that the trunk computed for them."""
    before = engine.runner.num_rows
    return support.run(engine, requests), engine.runner.num_rows - before


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_next_engine_reuses_the_files(family: str, tmp_path: Path) -> None:
    """Of 300 tokens, the next engine computes only those after the last stored block or snapshot, for the head too."""
    model, prompt = support.headed_model(family), support.prompt_of(300, 1)
    depth: dict[str, Any] = {"drafter": "mtp", "depth": 3}
    expected, _ = outputs_and_rows(engine_of(model, None, **depth), long_request(prompt))
    first, _ = outputs_and_rows(engine_of(model, tmp_path, **depth), long_request(prompt))
    engine = engine_of(model, tmp_path, **depth)
    num_uncached, drafter = [], engine.drafting.drafter
    inner = drafter.propose

    def propose(requests: Any) -> None:
        num_uncached.extend(drafter.num_uncached(request.sequence) for request in requests)
        inner(requests)

    drafter.propose = propose
    found, rows = outputs_and_rows(engine, long_request(prompt))
    support.assert_same(first, expected)
    support.assert_same(found, expected)
    assert engine.scheduler.prefix_hits == 296 and engine.memory.spill.hits.total() == 296 and rows <= 4 + 10 * 4
    assert num_uncached[0] <= 300 - 296, "the head computed the prompt again"
    again, _ = outputs_and_rows(engine, long_request(prompt))
    support.assert_same(again, expected)
    assert engine.memory.spill.hits.total() == 296, "the blocks were read from files again"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "block", "draft_model", "medusa"])
def test_heads_reuse_the_files(kind: str, tmp_path: Path) -> None:
    model, prompt = support.headed_model("llama", kind), support.prompt_of(200, 2)
    settings: dict[str, Any] = {"drafter": kind, "depth": 3}
    expected, _ = outputs_and_rows(engine_of(model, None, **settings), long_request(prompt))
    outputs_and_rows(engine_of(model, tmp_path, **settings), long_request(prompt))
    engine = engine_of(model, tmp_path, **settings)
    found, _ = outputs_and_rows(engine, long_request(prompt))
    support.assert_same(found, expected)
    assert engine.scheduler.prefix_hits == 192
    assert found["r", 0].stats == expected["r", 0].stats, "drafts are the same, too"


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [16, 80])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_varied_requests_keep_their_texts(family: str, blocks: int, tmp_path: Path) -> None:
    """All sampling parameters, batched and preempted, on three engines in turn."""
    model = support.agreeing_model(family)
    settings: dict[str, Any] = {"kv_blocks": blocks, "depth": AUTO, "max_model_len": 128, "max_num_batched_tokens": 32}
    requests = support.varied_requests(0.8)
    expected = support.run(engine_of(model, None, **settings), requests)
    for turn in range(3):
        engine = engine_of(model, tmp_path, **settings)
        support.assert_same(support.run(engine, requests), expected)
        assert not turn or blocks == 16 or engine.memory.spill.hits.total() > 0


@pytest.mark.slow
def test_concurrent_requests_load_a_common_prefix_once(tmp_path: Path) -> None:
    model, common = support.agreeing_model("llama"), support.prompt_of(150, 3)
    requests = [long_request([*common, *support.prompt_of(20 + i, i)], f"r{i}", n=2) for i in range(6)]
    expected = support.run(engine_of(model, None), requests)
    support.run(engine_of(model, tmp_path), requests)
    engine = engine_of(model, tmp_path)
    support.assert_same(support.run(engine, requests), expected)
    assert engine.scheduler.prefix_hits > 6 * 2 * 144
    assert engine.memory.spill.store.counts.loaded.total() < 120, "the common prefix was loaded more than once"


@pytest.mark.slow
def test_blocks_evicted_from_the_pool_are_found_in_files(tmp_path: Path) -> None:
    """Three conversations in turn, each about as long as the pool."""
    model = support.agreeing_model("llama")
    engine = engine_of(model, tmp_path, kv_blocks=50, max_model_len=400)
    prompts = [support.prompt_of(320, turn) for turn in range(3)]
    for prompt in prompts:
        support.run(engine, [long_request(prompt)])
    assert engine.scheduler.prefix_hits == 0
    for prompt in prompts:
        more = [*prompt, *support.prompt_of(8, 9)]
        expected = support.run(engine_of(model, None), [long_request(more)])
        support.assert_same(support.run(engine, [long_request(more)]), expected)
    assert engine.scheduler.prefix_hits == 3 * 320


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["bit", "cut"])
def test_corrupt_files_are_not_used(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = support.headed_model("qwen3_5"), support.prompt_of(300, 1)
    expected, _ = outputs_and_rows(engine_of(model, tmp_path), long_request(prompt))
    for path in files_in(tmp_path):
        data = bytearray(path.read_bytes())
        if how == "bit":
            data[-7] ^= 16
        path.write_bytes(data if how == "bit" else data[: len(data) // 2])
    engine = engine_of(model, tmp_path)
    with caplog.at_level(logging.WARNING, "headstart.cache"):
        found, _ = outputs_and_rows(engine, long_request(prompt))
    support.assert_same(found, expected)
    assert engine.scheduler.prefix_hits == 0 and engine.memory.spill.store.counts.dropped
    assert len([record for record in caplog.records if "damaged block file" in record.message]) == 1
    for _ in range(4):  # dropped files are written again; the others are found corrupt when they are read
        engine = engine_of(model, tmp_path)
        support.assert_same(outputs_and_rows(engine, long_request(prompt))[0], expected)
    assert engine.scheduler.prefix_hits == 296 and not engine.memory.spill.store.counts.dropped


def test_missing_block_ends_the_prefix(tmp_path: Path) -> None:
    model, prompt = support.headed_model("llama"), support.prompt_of(300, 1)
    engine = engine_of(model, tmp_path)
    expected, _ = outputs_and_rows(engine, long_request(prompt))
    keys = list(engine.memory.usable_keys(engine._start(long_request(prompt), 0)))
    engine.memory.spill.store.path(engine.memory.spill._parts[-1].name, keys[20]).unlink()
    engine = engine_of(model, tmp_path)
    support.assert_same(outputs_and_rows(engine, long_request(prompt))[0], expected)
    assert engine.scheduler.prefix_hits == 160


@pytest.mark.slow
@pytest.mark.parametrize("what", ["weights", "config", "version", "backend", "block size"])
def test_files_of_another_engine_are_not_found(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, arrays = support.family_of("llama").tiny(num_hidden_layers=2)
    prompt = support.prompt_of(200, 1)

    def loaded(dtype: str = "float64") -> Model:
        return support.model_at(write_model(support.new_folder(), config, arrays), dtype=dtype)

    outputs_and_rows(engine_of(loaded(), tmp_path), long_request(prompt))
    again = engine_of(loaded(), tmp_path)
    outputs_and_rows(again, long_request(prompt))
    assert again.scheduler.prefix_hits == 192, "a copy of the model at another path has other blocks"
    settings = {"backend": {"dtype": "float32"}, "block size": {"block_size": 16}}.get(what, {})
    if what == "weights":
        name = next(name for name in arrays if "embed" in name)
        arrays = {**arrays, name: arrays[name].copy()}
        arrays[name][77, 3] += 1  # one number of a token that is not in the prompt
    elif what == "config":
        config = {**config, "rope_theta": 12345.0}
    elif what == "version":
        monkeypatch.setattr("headstart.engine.build.__version__", "0.0.0")
    model = loaded(settings.get("dtype", "float64"))
    other = engine_of(model, tmp_path, **settings)
    expected, _ = outputs_and_rows(engine_of(model, None, **settings), long_request(prompt))
    support.assert_same(outputs_and_rows(other, long_request(prompt))[0], expected)
    assert other.scheduler.prefix_hits == 0 and other.memory.spill.store.counts.saved > 0


@pytest.mark.slow
def test_cache_salts_separate_blocks(tmp_path: Path) -> None:
    model, prompt = support.headed_model("llama"), support.prompt_of(200, 1)
    outputs_and_rows(engine_of(model, tmp_path), replace(long_request(prompt), cache_salt="a"))
    for salt, hits in (("b", 0), ("", 0), ("a", 192)):
        engine = engine_of(model, tmp_path)
        outputs_and_rows(engine, replace(long_request(prompt), cache_salt=salt))
        assert engine.scheduler.prefix_hits == hits


@pytest.mark.slow
def test_generation_continues_if_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*about: Any) -> None:
        raise OSError(28, os.strerror(28))

    model, requests = support.agreeing_model("llama"), support.varied_requests(0.8)
    expected = support.run(support.make(model), requests)
    monkeypatch.setattr("headstart.cache.store._write_all", full)
    engine = support.make(model, kv_spill=str(tmp_path))
    with caplog.at_level(logging.WARNING, "headstart.cache"):
        support.assert_same(support.run(engine, requests), expected)
        shutil.rmtree(tmp_path)
        support.assert_same(support.run(engine, requests), expected)
    assert len(caplog.records) == 1 and engine.memory.spill.store.counts.failed == 1


def call_before_reads(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """Calls `wait` before every read of a block."""
    get = BlockStore.get
    monkeypatch.setattr(BlockStore, "get", lambda *about, **more: (wait(), get(*about, **more))[1])


def test_slow_disk_does_not_delay_other_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests run while a prefix is loaded; a request aborted meanwhile leaves no state."""
    model, prompt = support.agreeing_model("llama"), support.prompt_of(200, 1)
    outputs_and_rows(engine_of(model, tmp_path), long_request(prompt))
    may_read = threading.Event()
    call_before_reads(monkeypatch, lambda: may_read.wait(support.PATIENCE))
    monkeypatch.setattr("headstart.cache.spill.MAX_LOAD_S", 1e9)
    engine, order = engine_of(model, tmp_path), []
    new = long_request(support.prompt_of(20, 7), "new", max_tokens=3)
    for each in (
        long_request(prompt, "known"),
        long_request(prompt[:150], "also", max_tokens=3),
        new,
        long_request(prompt, "gone"),
    ):
        engine.submit(each)
    assert len(engine.scheduler.waiting) == 4
    while engine.has_work:
        engine.step(lambda deltas: order.extend(each.request_id for each in deltas if each.finish_reason))
        engine.abort("gone")
        if order:
            may_read.set()
    assert order[0] == "new" and set(order) == {"new", "also", "known"} and engine.scheduler.prefix_hits == 192 + 144
    support.assert_clean(engine)


def test_prefix_is_computed_if_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The blocks of the load are freed once the disk responds."""
    model, prompt = support.agreeing_model("llama"), support.prompt_of(200, 1)
    expected, _ = outputs_and_rows(engine_of(model, tmp_path), long_request(prompt))
    may_read = threading.Event()
    call_before_reads(monkeypatch, lambda: may_read.wait(support.PATIENCE))
    monkeypatch.setattr("headstart.cache.spill.MAX_LOAD_S", 0.05)
    engine, found = engine_of(model, tmp_path), dict[Any, Any]()
    with caplog.at_level(logging.WARNING, "headstart.cache"):
        for name in ("r", "also"):
            engine.submit(long_request(prompt, name))
            while engine.has_work:
                engine.step(lambda deltas: support.collect(found, deltas))
    support.assert_same({("r", 0): found["r", 0]}, expected)
    assert found["also", 0].tokens == expected["r", 0].tokens and "was not loaded within" in caplog.text
    may_read.set()
    while engine.memory.spill._loads:
        engine.memory.collect()
    support.assert_clean(engine)


@pytest.mark.slow
def test_loading_sequences_give_their_blocks_to_running_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = support.agreeing_model("llama"), [support.prompt_of(100, i) for i in range(4)]
    requests = [long_request(prompt, f"r{i}", max_tokens=20) for i, prompt in enumerate(prompts)]
    settings: dict[str, Any] = {"kv_blocks": 16, "max_model_len": 128}
    expected = support.run(engine_of(model, None, **settings), requests)
    support.run(engine_of(model, tmp_path, **settings), requests)
    call_before_reads(monkeypatch, lambda: time.sleep(0.002))
    support.assert_same(support.run(engine_of(model, tmp_path, **settings), requests), expected)


def test_changed_head_has_its_own_files(tmp_path: Path) -> None:
    """Each head stores its blocks under its own name."""
    first = support.agreeing_model("llama")
    second = replace(first, head=replace(support.make_head(first, seed=5), source="another"))
    settings: dict[str, Any] = {"drafter": "mtp", "depth": 3}
    engine, prompt = engine_of(first, tmp_path, **settings), support.prompt_of(200, 1)
    expected = support.run(engine, [long_request(prompt)])
    change_head(engine, second, EngineConfig(**support.SMALL, **settings))
    support.assert_same(support.run(engine, [long_request(prompt)]), expected)
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 3, "a trunk, two heads"
    for model in (first, second):
        found, _ = outputs_and_rows(fresh := engine_of(model, tmp_path, **settings), long_request(prompt))
        support.assert_same(found, expected)
        assert fresh.scheduler.prefix_hits == 192
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.slow
def test_two_running_engines_share_a_folder(tmp_path: Path) -> None:
    """Each engine finds the blocks that the other has written."""
    model, prompts = support.agreeing_model("llama"), [support.prompt_of(100, i) for i in range(6)]
    engines = [engine_of(model, tmp_path), engine_of(model, tmp_path)]
    expected = [support.run(engine_of(model, None), [long_request(prompt)]) for prompt in prompts]
    for turn, prompt in enumerate(prompts):
        for engine in engines if turn % 2 else engines[::-1]:
            support.assert_same(support.run(engine, [long_request(prompt)]), expected[turn])
    assert [engine.scheduler.prefix_hits for engine in engines] == [3 * 96, 3 * 96]


@pytest.mark.slow
def test_files_stay_within_kv_spill_gb(tmp_path: Path) -> None:
    model, most = support.agreeing_model("llama"), 600_000
    engine = engine_of(model, tmp_path, kv_spill_gb=most / 1e9)
    for turn in range(6):
        support.run(engine, [long_request(support.prompt_of(200, turn), max_tokens=2)])
        assert sum([-(-path.stat().st_size // 4096) * 4096 for path in files_in(tmp_path)]) <= most
    assert engine.memory.spill.store.counts.evicted > 0


def test_prompt_logprobs_skip_the_files(tmp_path: Path) -> None:
    model, prompt = support.headed_model("llama"), support.prompt_of(100, 1)
    outputs_and_rows(engine_of(model, tmp_path), long_request(prompt))
    engine = engine_of(model, tmp_path)
    found, rows = outputs_and_rows(engine, long_request(prompt, prompt_logprobs=1))
    assert len(found["r", 0].prompt_logprobs) == 99 and engine.scheduler.prefix_hits == 0 and rows >= 100


def test_invalid_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--kv-spill-gb is 0, but must be above 0"):
        EngineConfig(kv_spill_gb=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--kv-spill: cannot write"):
        engine_of(support.headed_model("llama"), tmp_path / "file")


def test_closing_writes_pending_blocks(tmp_path: Path) -> None:
    model, prompt = support.headed_model("llama"), support.prompt_of(200, 1)
    engine = engine_of(model, tmp_path)
    engine.submit(long_request(prompt))
    while engine.has_work:
        engine.step(lambda deltas: None)
    engine.memory.spill.close()
    engine = engine_of(model, tmp_path)
    outputs_and_rows(engine, long_request(prompt))
    assert engine.scheduler.prefix_hits == 192
    assert engine.memory.spill.hits["ram"] + engine.memory.spill.hits["disk"] == 192
