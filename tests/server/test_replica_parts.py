"""Parts of replicas without processes: CPU shares, commands, router, metrics, shared budgets."""

import asyncio
import sys
from pathlib import Path

import pytest

from headstart.cli.main import main
from headstart.errors import LimitError, UsageError
from headstart.machine import Node
from headstart.server.accounts import Accounts
from headstart.server.replicas import metrics, router
from headstart.server.replicas.group import ReplicaGroup, ReplicaId, ReplicaInfo, divide_cpus
from headstart.server.replicas.router import RouterProcess
from headstart.server.replicas.supervisor import command
from headstart.system import describe_exit

TWO_NODES = (Node(0, ((0, 1, 2, 3),)), Node(1, ((4, 5, 6, 7),)))


def make_info(number: int, url: str = "http://127.0.0.1:1") -> ReplicaInfo:
    return ReplicaInfo(number=number, url=url, pid=1, state="ready", starts=2, since=0.0, cpus=(number,))


@pytest.fixture
def member(tmp_path: Path) -> ReplicaId:
    ReplicaGroup(
        cache_bytes=5,
        router="http://127.0.0.1:1",
        relay="http://127.0.0.1:1",
        token="t",
        replicas=(make_info(0), make_info(1)),
    ).write(tmp_path)
    return ReplicaId(tmp_path, 1)


@pytest.mark.parametrize(("wanted", "quota", "parts"), [
    ("1", None, [(0, 1, 2, 3, 4, 5, 6, 7)]), ("2", None, [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ("3", None, [(0, 1), (2, 3, 4), (5, 6, 7)]), ("numa", None, [(0, 1, 2, 3), (4, 5, 6, 7)]), ("2", 4.0, [(), ()]),
])  # fmt: skip
def test_cores_are_divided(tmp_path: Path, wanted: str, quota: float | None, parts: list[tuple[int, ...]]) -> None:
    shares = divide_cpus(wanted, None, TWO_NODES, quota, tmp_path)
    assert [share.cpus for share in shares] == parts
    assert sum(share.threads for share in shares) == (quota or 8)


def test_hyperthreads_of_a_core_stay_together(tmp_path: Path) -> None:
    for cpu in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    shares = divide_cpus("2", None, (Node(0, ((0, 1, 2, 3),)),), None, tmp_path)
    assert [share.cpus for share in shares] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(("wanted", "threads"), [("0", None), ("9", None), ("two", None), ("-1", None), ("2", 5)])
def test_invalid_numbers_of_replicas_are_refused(tmp_path: Path, wanted: str, threads: int | None) -> None:
    with pytest.raises(UsageError, match="--replicas"):
        divide_cpus(wanted, threads, TWO_NODES, None, tmp_path)


def test_replica_command_keeps_the_arguments_and_adds_a_port(member: ReplicaId) -> None:
    line = command(["serve", "a-model", "--port", "8000", "--", "x"], member, 9000, 2)
    assert line[:5] == [sys.executable, "-m", "headstart", "serve", "a-model"]
    assert line[-2:] == ["--", "x"]
    assert line.index("9000") > line.index("8000")
    assert ReplicaId.of(line[line.index("--replica") + 1]) == member


def test_router_command_has_valid_flags() -> None:
    made = RouterProcess("0.0.0.0", 8000, 9000)
    assert made.url == "http://127.0.0.1:8000"
    words = made.command(["http://127.0.0.1:1", "http://127.0.0.1:2"])
    assert words[words.index("--worker-urls") + 1 :] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert words[words.index("--cors-allowed-origins") + 1] == made.url
    args = pytest.importorskip("vllm_router.launch_router").parse_router_args(words[3:])
    assert (args.policy, args.port, args.disable_circuit_breaker) == ("cache_aware", 8000, True)


def test_unreachable_replicas_count_as_down(member: ReplicaId) -> None:
    own = 'vllm:num_requests_running{model_name="m"} 3.0\nvllm:num_requests_waiting{model_name="m"} 0.0\n'
    found = asyncio.run(metrics.collect(member, own))
    values = {(each.name, each.labels["engine"]): each.value for metric in found for each in metric.samples}
    assert values["vllm:num_requests_running", "1"] == 3.0
    assert (values["headstart:replica_up", "0"], values["headstart:replica_up", "1"]) == (0.0, 1.0)
    assert values["headstart:replica_starts_total", "0"] == 2.0
    listed = asyncio.run(metrics.list_replicas(member, own))
    assert [each["running"] for each in listed] == [None, 3.0]


def test_replicas_share_the_budgets_of_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[a]\nkey = 'a'\ntokens_per_day = 1000\n[b]\nkey = 'b'\nrequests_per_minute = 2\n")
    one, two = (Accounts.of((), keys) for _ in range(2))
    for each in (one, two):
        each.share(tmp_path)
    (first, second), (first_there, second_there) = list(one), list(two)
    first.begin(400)
    first_there.begin(400)
    assert int(first.headers()["x-ratelimit-remaining-tokens"]) in (200, 201)
    with pytest.raises(LimitError, match="tokens"):
        first_there.begin(400)
    second.begin(1)
    second_there.begin(1)
    with pytest.raises(LimitError, match="requests"):
        second.begin(1)


@pytest.mark.parametrize("text", ["", "x", "nowhere:1", "/tmp:one"])
def test_internal_replica_option_is_validated(text: str) -> None:
    with pytest.raises(UsageError, match="--replica"):
        ReplicaId.of(text)


@pytest.mark.parametrize("url", ["router:8000", "ftp://router", "http://", "http://x:notaport"])
def test_join_requires_a_url(url: str) -> None:
    with pytest.raises(UsageError, match="--join"):
        router.check_address(url, "127.0.0.1")


def test_join_refuses_a_local_address_with_a_remote_router() -> None:
    with pytest.raises(UsageError, match="cannot reach"):
        router.check_address("http://192.0.2.1:8000", "127.0.0.1")
    assert router.own_url("http://127.0.0.1:8000", "127.0.0.1", 9000, tls=False) == "http://127.0.0.1:9000"
    assert router.own_url("http://127.0.0.1:8000", "0.0.0.0", 9000, tls=True) == "https://127.0.0.1:9000"


def test_unreachable_router_is_reported_without_exception() -> None:
    assert asyncio.run(router.registered("http://127.0.0.1:1")) is None
    assert asyncio.run(router.register("http://127.0.0.1:1", "http://127.0.0.1:2")) is False


def test_exit_descriptions() -> None:
    assert [describe_exit(code) for code in (2, -9, -63)] == ["with code 2", "by SIGKILL", "by signal 63"]


def test_missing_router_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(router, "MODULE", "no_such_router")
    assert main(["serve", "--replicas", "1"]) == 2
    assert "pip install vllm-router" in capsys.readouterr().err
