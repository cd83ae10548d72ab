"""Prefill and decode servers: texts equal those of one server, with a shared folder, over HTTP and after failures."""

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from inside import LlmServer, serve_llm
from process import HttpServer, running
from support import new_folder
from tiny_models import write_tiny

from headstart.api import LLM
from headstart.cache.blocks import prefix_keys
from headstart.config import EngineConfig

pytestmark = pytest.mark.slow  # server processes
SMALL = ("--threads", "1", "--max-num-seqs", "8", "--kv-blocks", "512")
LENGTH = 400


@contextmanager
def serving(model: str, kv: Path | None = None, **settings: Any) -> Iterator[LlmServer]:
    """A server of `model` in this process; `kv`: the folder of spilled blocks."""
    config = EngineConfig(threads=1, max_num_seqs=8, kv_blocks=512, kv_spill=None if kv is None else str(kv))
    with LLM(model, config) as llm, serve_llm(llm, **settings) as server:
        yield server


@pytest.fixture
def family() -> str:
    """The default family, with an MTP head."""
    return "mimo"


@cache
def model_of(family: str) -> str:
    return str(write_tiny(family, new_folder()))


@pytest.fixture
def model(family: str) -> str:
    return model_of(family)


def prompt_of(seed: int, length: int = LENGTH) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 120) for _ in range(length)]


def answer(server: HttpServer, seed: int, **more: Any) -> Any:
    found = server.post(
        "/v1/completions", prompt=prompt_of(seed), max_tokens=20, temperature=0.8, seed=seed, logprobs=1,
        ignore_eos=True, speculation={"mode": "auto", "depth": 2}, **more,
    )  # fmt: skip
    assert found.status_code == 200, found.text
    choice = found.json()["choices"][0]
    return choice["text"], choice["logprobs"]


def answers(server: HttpServer, seeds: range) -> list[Any]:
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda seed: answer(server, seed), seeds))


@cache
def expected_of(family: str) -> list[Any]:
    """Answers of a single server."""
    with serving(model_of(family)) as server:
        return answers(server, range(8))


@pytest.fixture
def expected(family: str) -> list[Any]:
    return expected_of(family)


@pytest.fixture
def prefill(model: str, tmp_path: Path) -> Iterator[LlmServer]:
    with serving(model, tmp_path / "kv", role="prefill") as server:
        yield server


@pytest.mark.parametrize(("family", "place"), [
    ("mimo", "kv"), ("mimo", "other"), ("qwen3_5", "other"),
], ids=["shared folder", "over HTTP", "recurrent layers"])  # fmt: skip
def test_decode_server_uses_prompts_of_the_prefill_server(
    model: str, expected: list[Any], prefill: LlmServer, place: str, tmp_path: Path
) -> None:
    with serving(model, tmp_path / place, role="decode", prefill=prefill.url) as decode:
        assert answers(decode, range(8)) == expected
        assert decode.metric("headstart:prefill_prompts_total") == 8
        assert decode.metric("headstart:prefill_failed_total") == 0
        assert (decode.metric("headstart:prefill_fetched_total") > 0) == (place == "other")
        known = decode.metric("headstart:kv_hit_tokens_total")
        assert known == decode.metric("vllm:prefix_cache_hits_total") >= 8 * (LENGTH - 16)
        assert decode.metric("vllm:spec_decode_num_drafts_total") > 0
        assert prefill.metric("vllm:spec_decode_num_drafts_total") == 0, "drafts are made on the decode side only"
        assert answers(decode, range(8)) == expected
        assert decode.metric("headstart:prefill_prompts_total") == 8, "cached prompts were prefilled again"
        decode.wait_idle()
    prefill.wait_idle()


def test_later_blocks_of_a_prompt_are_evicted_first(model: str, prefill: LlmServer, tmp_path: Path) -> None:
    with serving(model, tmp_path / "other", role="decode", prefill=prefill.url) as decode:
        answer(decode, 0)
    keys = [key.hex() for key in prefix_keys(prompt_of(0)[:-1], "", 16)]
    (trunk,) = (tmp_path / "kv").iterdir()
    times = [(tmp_path / "other" / trunk.name / key[:2] / key).stat().st_mtime_ns for key in keys]
    assert len(times) == LENGTH // 16 - 1 and times == sorted(times, reverse=True)


def test_decode_server_survives_a_killed_prefill_server(model: str, expected: list[Any], tmp_path: Path) -> None:
    """SIGKILL during requests: all texts stay the same."""
    with (
        running(model, *SMALL, "--role", "prefill", "--kv-spill", str(tmp_path / "kv")) as prefill,
        running(model, *SMALL, "--prefill", prefill.url, "--kv-spill", str(tmp_path / "other")) as decode,
    ):
        with ThreadPoolExecutor(8) as threads:
            found = [threads.submit(answer, decode, seed) for seed in range(8)]
            prefill.stop(signal.SIGKILL)
            assert [each.result() for each in found] == expected
        assert answer(decode, 0) == expected[0]
        assert answer(decode, 100)[0]
        assert decode.metric("headstart:prefill_failed_total") >= 1
        assert decode.log.read_text().count("prompts are computed here") == 1


@pytest.mark.parametrize("reason", ["another model", "404"])
def test_unsuitable_prefill_server_is_reported_once(
    model: str, expected: list[Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another model, or a server without the prefill role: one log line and the same texts."""
    if reason == "404":
        other = serving(model)
    else:
        other = serving(str(write_tiny("llama", tmp_path / "llama")), tmp_path / "kv", role="prefill")
    with other as wrong, serving(model, tmp_path / "own", role="decode", prefill=wrong.url) as decode:
        assert answer(decode, 1) == expected[1]
        assert decode.metric("headstart:prefill_failed_total") == 1
    (said,) = [line for line in caplog.messages if "prompts are computed here" in line]
    assert reason in said


def test_prefill_and_block_endpoints_check_requests_and_keys(model: str, prefill: LlmServer, tmp_path: Path) -> None:
    found = prefill.post("/kv/prefill", prompt=prompt_of(1)).json()
    assert found["trunk"] in found["files"] and found["files"][found["trunk"]] == list(range(LENGTH // 16))
    for path, status in ((f"/kv/blocks/{found['trunk']}/{'0' * 32}", 404), (f"/kv/blocks/{'0' * 32}/{'0' * 32}", 400),
                         (f"/kv/blocks/{found['trunk']}/..%2F..%2Fx", 404)):  # fmt: skip
        answered = prefill.client.get(path)
        assert answered.status_code == status, answered.text
    for body in ({}, {"prompt": []}, {"prompt": [10**6]}, {"prompt": [-1]}, {"prompt": "x"}):
        assert prefill.post("/kv/prefill", **body).status_code == 400
    with serving(model, tmp_path / "kv") as ordinary:
        assert ordinary.post("/kv/prefill", prompt=[5]).status_code == 404
    with serving(model, tmp_path / "kv", role="prefill", api_key=("one",)) as closed:
        assert closed.post("/kv/prefill", prompt=prompt_of(1)).status_code == 401
        settings = {"role": "decode", "prefill": closed.url, "api_key": ("one",)}
        with serving(model, tmp_path / "new", **settings) as decode:
            decode.client.headers["Authorization"] = "Bearer one"
            assert answer(decode, 3)[0]
            assert decode.metric("headstart:prefill_prompts_total") == 1
