"""Several servers behind a router: devices, ports and roles of each, refused combinations."""

import json
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest

from headstart import machine
from headstart.cli.main import main
from headstart.errors import CapacityError, UsageError
from headstart.tools.launch import fleet, prepare as launch
from headstart.tools.launch.fleet import parse_roles
from headstart.tools.launch.model_facts import read_facts
from headstart.tools.launch.parallelism import cores_of_workers
from headstart.tools.launch.spec import LaunchPlan, LaunchStep

Capture = pytest.CaptureFixture[str]


def small_gguf(folder: Path, name: str = "m.gguf", tensor: str = "token_embd.weight") -> str:
    """A GGUF file with the fields that `launch` reads."""
    writer = gguf.GGUFWriter(folder / name, "llama")
    writer.add_head_count(8)
    writer.add_tensor(tensor, np.zeros((4, 32), np.float32))
    return str(gguf_files.written(writer, folder / name))


def test_parts_of_a_split_gguf_model_count_together(tmp_path: Path) -> None:
    first = small_gguf(tmp_path, "m-00001-of-00002.gguf")
    small_gguf(tmp_path, "m-00002-of-00002.gguf", "blk.1.nextn.eh_proj.weight")
    assert read_facts(first).weight_bytes == 2 * 4 * 32 * 4


def plan_launch(model: str, engine: str = "vllm", **options: Any) -> LaunchPlan:
    return launch.prepare(launch.LaunchOptions(engine=engine, model=model, **options)).plan


def after(step: LaunchStep, flag: str) -> str:
    return step.words[step.words.index(flag) + 1]


def test_disaggregate_is_parsed_into_roles() -> None:
    assert parse_roles(" 2:1 ") == ("prefill", "prefill", "decode")
    for text in ("", "1", "1:", "0:1", "1:0", "2:1:1", "a:b", "1,1", "-1:2"):
        with pytest.raises(UsageError, match="numbers of prefill and decode"):
            parse_roles(text)


def test_vllm_prefill_and_decode_servers(model: str) -> None:
    """Each server has its own device, port and side channel. All draft alike. The router takes the user's port."""
    prefill, decode, router = plan_launch(model, gpus="h100x2", disaggregate="1:1", port=9000).serve
    for number, (step, role) in enumerate([(prefill, "kv_producer"), (decode, "kv_consumer")]):
        assert step.environment == {
            "CUDA_VISIBLE_DEVICES": str(number),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + number),
        }
        assert after(step, "--port") == str(9001 + number) == str(step.port)
        assert json.loads(after(step, "--kv-transfer-config")) == {"kv_connector": "NixlConnector", "kv_role": role}
    assert after(prefill, "--speculative-config") == after(decode, "--speculative-config")
    assert router.words[:6] == ("vllm-router", "--host", "127.0.0.1", "--port", "9000", "--vllm-pd-disaggregation")
    assert after(router, "--decode-policy") == "round_robin"  # the router warns about other policies for one server
    assert (after(router, "--prefill"), after(router, "--decode")) == ("http://127.0.0.1:9001", "http://127.0.0.1:9002")


def test_data_parallel_ranks_have_distinct_side_channels(model: str) -> None:
    found = [step.environment for step in plan_launch(model, gpus="h100x4", disaggregate="1:1", tp=1, dp=2).serve[:2]]
    assert [each["VLLM_NIXL_SIDE_CHANNEL_PORT"] for each in found] == ["5600", "5602"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0,1", "2,3"]


def test_sglang_prefill_and_decode_servers(model: str) -> None:
    """The router gets the bootstrap port of each prefill server."""
    *servers, router = plan_launch(model, "sglang", gpus="h100x4", disaggregate="2:1", tp=1).serve
    assert [step.role for step in servers] == ["prefill", "prefill", "decode"]
    assert [after(step, "--disaggregation-mode") for step in servers] == ["prefill", "prefill", "decode"]
    assert [after(step, "--disaggregation-bootstrap-port") for step in servers[:2]] == ["8998", "8999"]
    line = " ".join(router.words)
    assert line.startswith("sglang-router launch --host 127.0.0.1 --port 8000 --pd-disaggregation")
    assert "--prefill http://127.0.0.1:8001 8998 --prefill http://127.0.0.1:8002 8999" in line


def test_servers_fill_one_machine_after_another(model: str) -> None:
    *servers, router = plan_launch(model, gpus="h100x2", nodes=2, disaggregate="2:2", tp=1, head_node="10.0.0.1").serve
    assert [(step.node, step.environment["CUDA_VISIBLE_DEVICES"]) for step in servers] == [
        (0, "0"), (0, "1"), (1, "0"), (1, "1"),
    ]  # fmt: skip
    assert all(after(step, "--host") == "0.0.0.0" for step in servers)
    assert after(router, "--prefill") == "http://10.0.0.1:8001"
    assert after(router, "--decode") == "http://NODE_1:8003" and servers[3].where == "decode-1 on node 1"
    assert after(router, "--decode-policy") == "power_of_two"


@pytest.mark.parametrize(("options", "message"), [
    ({"gpus": "h100x1", "disaggregate": "1:1"}, "2 servers of 1 GPUs do not fit on 1 x 1"),
    ({"gpus": "h100x2", "disaggregate": "1:1", "tp": 2}, "2 servers of 2 GPUs do not fit"),
    ({"gpus": "h100x2", "disaggregate": "1:1", "role": "decode"}, "cannot go together"),
    ({"gpus": "h100x2", "disaggregate": "1:1", "settings": {"ssl_certfile": "x"}}, "go with several servers"),
    ({"gpus": "ascend-910bx2", "engine": "xllm", "disaggregate": "1:1"}, "has no router for prefill/decode"),
    ({"gpus": "h100x2", "engine": "trtllm", "disaggregate": "1:1"}, "has no router for prefill/decode"),
    ({"gpus": "h100x4", "engine": "trtllm", "disaggregate": "1:1", "dp": 2}, "takes --disaggregate or --dp"),
    ({"gpus": "none", "engine": "sglang", "tp": 2}, "has no --tp on a CPU"),
    ({"gpus": "none", "extra": ("--distributed-executor-backend=ray",)}, "vLLM refuses Ray on a CPU"),
    ({"gpus": "none", "tp": 3}, "must divide the 8 attention heads"),
])  # fmt: skip
def test_impossible_fleets_are_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, CapacityError), match=message):
        plan_launch(model, **options)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda nodes: [(0,), (1,), (4,), (5,)])
    monkeypatch.setattr(machine, "nodes", lambda: (machine.Node(0, ((0, 1, 4, 5),)),))


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("sizes", "bound"), [({"tp": 2}, "0,1|4,5"), ({"dp": 2}, "0,1|4,5"), ({"tp": 2, "dp": 2}, "0|1|4|5")]
)
def test_cpu_workers_have_distinct_cores(model: str, sizes: dict[str, int], bound: str) -> None:
    (step,) = plan_launch(model, gpus="none", **sizes).serve
    assert step.environment["VLLM_CPU_OMP_THREADS_BIND"] == bound


@pytest.mark.usefixtures("four_cores")
def test_cpu_prefill_and_decode_servers_have_distinct_cores(model: str) -> None:
    steps = plan_launch(model, gpus="none", disaggregate="1:1").serve[:2]
    assert [step.environment["VLLM_CPU_OMP_THREADS_BIND"] for step in steps] == ["0,1", "4,5"]
    assert "CUDA_VISIBLE_DEVICES" not in steps[0].environment


@pytest.mark.usefixtures("four_cores")
def test_cores_are_divided_among_workers(model: str) -> None:
    with pytest.raises(UsageError, match="takes 8 cores, one for each worker, but there are 4"):
        plan_launch(model, gpus="none", tp=8)
    (step,) = plan_launch(model, gpus="none").serve
    assert "VLLM_CPU_OMP_THREADS_BIND" not in step.environment and cores_of_workers(1, 1, range(8)) == ()
    assert cores_of_workers(2, 2, range(8)) == ()  # one NUMA node each: engines bind themselves
    assert cores_of_workers(3, 1, range(8)) == ((0, 1), (2, 3, 4), (5, 6, 7))


@pytest.mark.usefixtures("four_cores")
def test_llamacpp_replicas_are_behind_a_router(tmp_path: Path) -> None:
    *servers, router = plan_launch(small_gguf(tmp_path), "llamacpp", gpus="none", dp=2).serve
    assert [after(step, "--cpu-mask") for step in servers] == ["3", "30"]
    assert [after(step, "--threads") for step in servers] == ["2", "2"]
    assert "--worker-urls http://127.0.0.1:8001 http://127.0.0.1:8002 --policy cache_aware" in " ".join(router.words)
    *servers, _ = plan_launch(small_gguf(tmp_path), "llamacpp", gpus="m4x2", dp=2).serve
    assert len(servers) == 2 and not any(step.environment for step in servers)  # Apple's GPUs have no such variable
    *servers, _ = plan_launch(small_gguf(tmp_path), "llamacpp", gpus="h100x2", dp=2).serve
    assert [step.environment for step in servers] == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]


def test_printed_commands_name_their_servers(model: str, capsys: Capture) -> None:
    assert main(["launch", "vllm", model, "--gpus", "h100x2", "--disaggregate", "1:1", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(f"# {name}:" in shown for name in ("prefill-0", "decode-0", "router"))
    assert "both sides must have the same caches" in shown
    assert main(["launch", "vllm", model, "--gpus", "h100x2", "--disaggregate", "1:1", "--docker"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("docker")]
    assert len(lines) == 3 and all("--network=host" in line for line in lines)
    assert "python:3.12-slim" in lines[2] and "pip install -q vllm-router==0.1.17" in lines[2]


def test_addresses_of_servers_by_target() -> None:
    assert fleet.LaunchTarget("slurm").address(1, 2) == "${NODES[1]}"
    assert fleet.LaunchTarget("k8s").address(1, 2) == "$(POD_IP)"
    assert fleet.LaunchTarget("k8s").head_address() == "$(LWS_LEADER_ADDRESS)"
    assert fleet.LaunchTarget("", "10.0.0.1").address(0, 2) == "10.0.0.1"
