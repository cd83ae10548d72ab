"""Accounts of API keys: rate limits with Retry-After, fair scheduling between keys, key files."""

import hashlib
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import support
from inside import LlmServer, serve_llm

from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.errors import CapacityError, LimitError, UsageError
from headstart.server import accounts
from headstart.server.accounts import Account, AccountLimits, Accounts, TokenBucket, duration, read_file

TEXT = "/v1/completions"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock of the token buckets in seconds; tests advance it."""
    now = [1000.0]
    monkeypatch.setattr(accounts.time, "monotonic", lambda: now[0])
    yield now


def account(**limits: Any) -> Account:
    return Account("name", b"", AccountLimits(**limits))


def test_token_bucket_refills_steadily_and_may_be_overdrawn(clock: list[float]) -> None:
    bucket = TokenBucket(60, 60)
    bucket.take(90)
    assert (bucket.level, bucket.wait_s(0), bucket.wait_s(10)) == (-30, 30, 40)
    clock[0] += 45
    assert bucket.level == 15
    clock[0] += 1e6
    assert bucket.level == 60


def test_requests_per_minute_limit(clock: list[float]) -> None:
    found = account(requests_per_minute=2)
    found.begin(5)
    found.begin(5)
    with pytest.raises(LimitError, match=r"no requests left for 30\.0 s") as refused:
        found.check()
    assert refused.value.seconds == pytest.approx(30)
    assert refused.value.headers == {
        "x-ratelimit-limit-requests": "2", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m0s",
    }  # fmt: skip
    clock[0] += 31
    found.check()
    assert (found.requests, found.refused) == (2, 1)


def test_token_limits_count_prompt_and_output_tokens(clock: list[float]) -> None:
    found = account(tokens_per_minute=100, tokens_per_day=1000)
    found.begin(60)
    found.charge_output(70)  # output is charged after the fact, even beyond the budget
    with pytest.raises(LimitError, match="no tokens left"):
        found.check()
    assert found.headers()["x-ratelimit-remaining-tokens"] == "0"
    clock[0] += 60
    with pytest.raises(LimitError):
        found.begin(80)
    found.begin(60)
    with pytest.raises(CapacityError, match="100 at most"):
        found.begin(101)
    for _ in range(9):
        clock[0] += 60
        found.begin(90)
    clock[0] += 60
    with pytest.raises(LimitError) as refused:  # by the limit per day
        found.begin(90)
    assert refused.value.seconds > 600


def test_refused_requests_are_not_charged(clock: list[float]) -> None:
    found = account(requests_per_minute=10, tokens_per_minute=50)
    found.begin(40)
    for _ in range(20):
        with pytest.raises(LimitError):
            found.begin(40)
    assert found.headers()["x-ratelimit-remaining-requests"] == "9"


DURATIONS = [(0.02, "20ms"), (1, "1s"), (360, "6m0s"), (86400, "24h0s"), (3725, "1h2m5s")]


@pytest.mark.parametrize(("seconds", "text"), DURATIONS)
def test_durations_have_openai_format(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_one_key_cannot_fill_the_queue() -> None:
    both = Accounts.of(["one", "two"], None)
    greedy, other = both
    room = 48
    while True:
        try:
            both.check_queue_share(greedy, 1, room - greedy.held, 2.0)
        except LimitError as refused:
            assert refused.seconds == 2
            break
        greedy.held += 1
    assert 36 <= greedy.held <= 40
    both.check_queue_share(other, 8, room - greedy.held, 2.0)
    alone = Accounts.of(["one"], None)
    (only,) = alone
    only.held = 47
    alone.check_queue_share(only, 1, 1, 2.0)


def test_keys_are_found_by_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"secret").hexdigest()
    file.write_text(f'[alice]\nkey = "open"\nshare = 2\npriority = 1\n[bob]\nsha256 = "{digest}"\ntokens_per_day = 5\n')
    found = Accounts.of(["plain"], file)
    assert all(found.find(key) for key in (b"open", b"secret", b"plain"))
    assert not any(found.find(key) for key in (b"", b"other", digest.encode()))
    alice, bob = found.find(b"open"), found.find(b"secret")
    assert alice is not None and bob is not None
    assert (alice.limits.share, bob.limits.tokens_per_day, bob.name) == (2, 5, digest[:8])
    assert (alice.priority(None), alice.priority(0), alice.priority(7)) == (1, 1, 7)
    assert found.named("nobody").priority(-7) == -7
    assert "secret" not in repr(vars(found))


@pytest.mark.parametrize(("text", "message"), [
    ("", "has no keys"), ("key = 'a'", "key: it must be a table"), ("[a", "is no TOML"),
    ("[a]\nshare = 1", "a: it needs one of key and sha256"), ("[a]\nkey = ' '", "a: key is empty"),
    ("[a]\nsha256 = 'xyz'", "a: sha256 must be 64"), ("[a]\nkey = 'a'\nrpm = 3", "a: rpm is unknown"),
    ("[a]\nkey = 'a'\nrequests_per_minute = 0", "a: requests_per_minute is 0"),
    ("[a]\nkey = 'a'\ntokens_per_minute = inf", "a: tokens_per_minute is inf"),
    ("[a]\nkey = 'a'\nshare = nan", "a: share is nan"), ("[a]\nkey = 'a'\nshare = '2'", "a: share is '2'"),
    ("[a]\nkey = 'a'\npriority = 1.5", "a: priority is 1.5"),
    ("[a]\nkey = 'a'\npriority = 99999999999", "a: priority is 99999999999"),
])  # fmt: skip
def test_invalid_key_files_name_the_entry(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        read_file(file)


def test_invalid_key_file_ends_serve_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/nowhere/model", "--api-key-file", str(tmp_path / "none.toml")]) == 2
    assert "--api-key-file: cannot read" in capsys.readouterr().err
    file = tmp_path / "keys.toml"
    file.write_text("[a]\nkey = 'x'\n[b]\nkey = 'x'\n")
    assert main(["serve", "/nowhere/model", "--api-key-file", str(file)]) == 2
    assert "given twice" in capsys.readouterr().err


# Rate limits and fairness over HTTP.

KEYS = """\
[greedy]
key = "greedy"
[other]
key = "other"
[small]
key = "small"
requests_per_minute = 2
tokens_per_minute = 200
"""
CONFIG = EngineConfig(**{**support.SMALL, "dtype": "float64", "max_num_seqs": 4})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LlmServer]:
    (tmp_path / "keys.toml").write_text(KEYS)
    with serve_llm(LLM(support.headed_model("llama"), CONFIG), api_key_file=tmp_path / "keys.toml") as found:
        found.client.headers["Authorization"] = "Bearer other"
        yield found


def test_root_without_web_pages_needs_no_key(tmp_path: Path) -> None:
    """`ollama` asks for it before each command."""
    (tmp_path / "keys.toml").write_text(KEYS)
    llm = LLM(support.headed_model("llama"), CONFIG)
    with serve_llm(llm, api_key_file=tmp_path / "keys.toml", no_web=True) as found:
        assert found.client.head("/").status_code == 200
        assert found.client.get("/v1/models").status_code == 401


def complete(server: LlmServer, key: str, **more: Any) -> httpx.Response:
    body = {"prompt": [3, 4, 5], "max_tokens": 16, "ignore_eos": True, "seed": 1, **more}
    return server.client.post(TEXT, json=body, headers={"Authorization": f"Bearer {key}"})


def test_one_key_with_64_requests_does_not_starve_another(server: LlmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With first come, first served the other key would wait for nearly all 64."""
    engine, all_wait, order = server.served.llm.engine, threading.Event(), list[str]()
    forward, finish, admission = engine.runner.forward, engine.scheduler.finish, server.served.admission
    monkeypatch.setattr(engine.runner, "forward", lambda spans: all_wait.wait(support.PATIENCE) and forward(spans))

    def finished(sequence: Any) -> None:
        order.append(sequence.request.owner)
        finish(sequence)

    monkeypatch.setattr(engine.scheduler, "finish", finished)
    with ThreadPoolExecutor(67) as threads:
        answers = [threads.submit(complete, server, "greedy", seed=seed) for seed in range(64)]
        support.until(lambda: admission.num_in_flight == 64)
        answers += [threads.submit(complete, server, "other", seed=seed) for seed in range(3)]
        support.until(lambda: admission.num_in_flight == 67)
        all_wait.set()
    assert [each.result().status_code for each in answers] == [200] * 67
    greedy = order[0]
    assert order.count(greedy) == 64
    assert [owner == greedy for owner in order[:20]].count(False) == 3


def test_exhausted_budget_returns_429_with_rate_limit_headers(server: LlmServer) -> None:
    first = complete(server, "small")
    assert first.status_code == 200
    left = {name: value for name, value in first.headers.items() if name.startswith("x-ratelimit")}
    assert left["x-ratelimit-limit-requests"] == "2"
    assert left["x-ratelimit-remaining-requests"] == "1"
    assert int(left["x-ratelimit-remaining-tokens"]) < 200
    assert re.fullmatch(r"\d+(ms|s)", left["x-ratelimit-reset-tokens"])
    assert complete(server, "small", stream=True).headers["x-ratelimit-remaining-requests"] == "0"
    refused = complete(server, "small")
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert complete(server, "other").status_code == 200
    assert "x-ratelimit-limit-requests" not in complete(server, "other").headers
    assert complete(server, "nobody").status_code == 401
    name = hashlib.sha256(b"small").hexdigest()[:8]
    metrics = server.client.get("/metrics").text
    counts = {what: float(re.findall(rf'headstart:key_{what}_total{{[^}}]*key="{name}"[^}}]*}} (\S+)', metrics)[0])
              for what in ("requests", "refused", "generated_tokens")}  # fmt: skip
    assert counts == {"requests": 2, "refused": 1, "generated_tokens": 32}
    assert "small" not in metrics
