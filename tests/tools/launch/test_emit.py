"""Generated files for Compose, Slurm, Kubernetes and KubeRay, validated by schemas or run by bash."""

import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from support import PATIENCE

from headstart.cli.main import main
from headstart.tools.launch.launcher import dump_yaml

Capture = pytest.CaptureFixture[str]
TEXT, NUMBER, ANY = {"type": "string"}, {"type": "integer"}, {"type": "object"}


def keys_only(*required: str, **properties: Any) -> dict[str, Any]:
    """JSON schema of an object with these keys only."""
    return {"type": "object", "required": [*required], "properties": properties, "additionalProperties": False}


def array_of(items: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


CONTAINER = keys_only(
    "name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}, image=TEXT, command=array_of(TEXT),
    env=array_of(keys_only("name", name=TEXT, value=TEXT, valueFrom=ANY)), resources=ANY, volumeMounts=array_of(ANY),
    ports=array_of(ANY | {"required": ["containerPort"]}), startupProbe=ANY, readinessProbe=ANY, livenessProbe=ANY,
)  # fmt: skip
POD = keys_only("containers", containers=array_of(CONTAINER, 1), volumes=array_of(ANY | {"required": ["name"]}))
TEMPLATE = keys_only("spec", metadata=ANY, spec=POD)
GROUP = keys_only(
    "groupName", "maxReplicas", "minReplicas", "template", groupName=TEXT, replicas=NUMBER, minReplicas=NUMBER,
    maxReplicas=NUMBER, template=TEMPLATE, rayStartParams=ANY,
)  # fmt: skip
WORKERS = keys_only(
    "workerTemplate", size=NUMBER | {"minimum": 1}, leaderTemplate=TEMPLATE, workerTemplate=TEMPLATE,
    restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
)  # fmt: skip
RAY_HEAD = keys_only("template", rayStartParams=ANY | {"additionalProperties": TEXT}, template=TEMPLATE)
CLUSTER = keys_only("headGroupSpec", rayVersion=TEXT, headGroupSpec=RAY_HEAD, workerGroupSpecs=array_of(GROUP))
STRATEGY = keys_only(type={"enum": ["Recreate", "RollingUpdate"]})
PORTS = array_of(ANY | {"required": ["port"], "properties": {"port": NUMBER, "targetPort": NUMBER}})
SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io/v1",
                        keys_only("leaderWorkerTemplate", replicas=NUMBER, leaderWorkerTemplate=WORKERS)),
    "Deployment": ("apps/v1", keys_only("selector", "template", replicas=NUMBER, selector=ANY, template=TEMPLATE,
                                     strategy=STRATEGY)),
    "Service": ("v1", ANY | {"required": ["selector", "ports"], "properties": {"ports": PORTS}}),
    "RayService": ("ray.io/v1", keys_only("rayClusterConfig", serveConfigV2=TEXT, rayClusterConfig=CLUSTER)),
}  # fmt: skip
"""API version, and what the published schemas of these kinds ask of the parts that are written."""


def emit(capsys: Capture, *words: str) -> str:
    assert main(["launch", *words]) == 0
    return capsys.readouterr().out


def objects(text: str) -> list[dict[str, Any]]:
    """The YAML documents, each validated by its schema."""
    found = list(yaml.safe_load_all(text))
    for each in found:
        if each["kind"] in SCHEMAS:
            version, schema = SCHEMAS[each["kind"]]
            assert each["apiVersion"] == version
            jsonschema_rs.validator_for(schema).validate(each["spec"])
    return found


def containers(workload: dict[str, Any], template: str) -> dict[str, Any]:
    (container,) = workload["spec"].get("leaderWorkerTemplate", workload["spec"])[template]["spec"]["containers"]
    return dict(container)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_two_node_server_is_a_leader_worker_set(model: str, capsys: Capture, engine: str) -> None:
    text = emit(capsys, engine, model, "--gpus", "h100x4", "--nodes", "2", "--tp", "8", "--emit", "k8s")
    group, service = objects(text)
    assert (group["kind"], service["kind"]) == ("LeaderWorkerSet", "Service")
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
    leader, worker = (containers(group, f"{name}Template") for name in ("leader", "worker"))
    for each in (leader, worker):
        words = each["command"]
        assert words[words.index("--nnodes") + 1] == "$(LWS_GROUP_SIZE)"
        assert words[words.index("--node-rank") + 1] == "$(LWS_WORKER_INDEX)"
        assert any(word.startswith("$(LWS_LEADER_ADDRESS)") for word in words)
        assert each["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
        assert any(mount["mountPath"] == "/dev/shm" for mount in each["volumeMounts"])
    assert "readinessProbe" in leader and "readinessProbe" not in worker
    assert ("--headless" in worker["command"]) is (engine == "vllm") and "--headless" not in leader["command"]
    assert service["spec"]["selector"] == {"leaderworkerset.sigs.k8s.io/name": engine, "role": "leader"}
    assert group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"] == {"role": "leader"}


def test_prefill_and_decode_are_connected_by_services(model: str, capsys: Capture) -> None:
    found = objects(emit(capsys, "vllm", model, "--gpus", "h100x2", "--disaggregate", "1:1", "--emit", "k8s"))
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert names == [(kind, name) for name in ("prefill-0", "decode-0", "router") for kind in ("Deployment", "Service")]
    prefill, router = (containers(found[place], "template") for place in (0, 4))
    environment = {each["name"]: each.get("value") for each in prefill["env"]}
    assert next(iter(environment)) == "POD_IP" and environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
    assert "CUDA_VISIBLE_DEVICES" not in environment  # a pod sees only its own devices
    assert prefill["command"][prefill["command"].index("--host") + 1] == "0.0.0.0"
    assert "--prefill http://prefill-0:8000 --decode http://decode-0:8000" in " ".join(router["command"])
    assert "resources" not in router and found[5]["spec"]["ports"][0]["port"] == 8000


def test_depth_by_batch_is_mounted_as_a_config_map(model: str, capsys: Capture) -> None:
    words = ["sglang", model, "--gpus", "h100x1", "--depth-by-batch", "[[1, 4, 3], [5, 64, 0]]", "--emit", "k8s"]
    config, deployment, _ = objects(emit(capsys, *words))
    assert config["kind"] == "ConfigMap" and "adaptive.json" in config["data"]
    container = containers(deployment, "template")
    assert "/config/adaptive.json" in container["command"]
    assert any(mount["mountPath"] == "/config" for mount in container["volumeMounts"])


def test_kuberay_passes_engine_arguments_by_name(model: str, capsys: Capture) -> None:
    (service,) = objects(emit_for_repo(capsys, model, "--emit", "kuberay", "--nodes", "2", "--tp", "8"))
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    (config,) = application["args"]["llm_configs"]
    assert config["model_loading_config"] == {"model_id": "org/model", "model_source": "org/model"}
    drafting = {"method": "mtp", "num_speculative_tokens": 3}
    assert config["engine_kwargs"] == {"tensor_parallel_size": 8, "speculative_config": drafting,
                                       "distributed_executor_backend": "ray"}  # fmt: skip
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["replicas"] == 2


def emit_for_repo(capsys: Capture, model: str, *words: str) -> str:
    """Emits files for a Hub repo; only its headers are read."""
    from headstart.formats import open_checkpoint, remote

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "read_repo", lambda *_: open_checkpoint(Path(model)))
        return emit(capsys, "vllm", "org/model", "--gpus", "h100x4", *words)


def test_repo_is_fetched_with_an_optional_token(model: str, capsys: Capture) -> None:
    deployment, _ = objects(emit_for_repo(capsys, model, "--emit", "k8s", "--tp", "1"))
    container = containers(deployment, "template")
    token = next(each for each in container["env"] if each["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"]["optional"] is True
    assert any(mount["name"] == "hf-cache" for mount in container["volumeMounts"])


def test_compose_services_and_dependencies(model: str, capsys: Capture) -> None:
    words = ["vllm", model, "--gpus", "h100x2", "--disaggregate", "1:1", "--emit", "compose"]
    services = yaml.safe_load(emit(capsys, *words))["services"]
    assert list(services) == ["prefill-0", "decode-0", "router"]
    assert services["router"]["depends_on"] == {key: {"condition": "service_healthy"} for key in list(services)[:2]}
    assert services["router"]["command"][1].endswith('exec "$$@"')  # "$$": Compose expands "$"
    prefill = services["prefill-0"]
    assert prefill["environment"]["CUDA_VISIBLE_DEVICES"] == "0" and prefill["volumes"] == [f"{model}:{model}:ro"]
    assert "http://127.0.0.1:8001/health" in prefill["healthcheck"]["test"][-1]


@pytest.mark.parametrize("words", [
    "vllm --gpus h100x4 --nodes 2 --tp 8", "vllm --gpus h100x4 --nodes 2 --tp 8 --engine-version 0.11.0",
    "sglang --gpus h100x1 --nodes 2 --disaggregate 1:1",
])  # fmt: skip
def test_slurm_runs_each_command_on_its_node(model: str, capsys: Capture, tmp_path: Path, words: str) -> None:
    """Bash runs the script with fake srun and scontrol that record their arguments."""
    script = tmp_path / "job.sh"
    engine, *options = words.split()
    script.write_text(emit(capsys, engine, model, *options, "--emit", "slurm"))
    programs = {"scontrol": "echo alpha; echo beta", "srun": 'printf "%s|" "$@" >> $CALLS; echo >> $CALLS', "sleep": ""}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls), "SLURM_JOB_NODELIST": "x",
                   "SLURM_SUBMIT_DIR": str(tmp_path)}  # fmt: skip
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert "requests go to http://alpha:8000" in done.stdout, done.stderr
    assert done.returncode == 0 and "has ended with code 0" in done.stderr
    srun_calls = calls.read_text().splitlines()
    on = {node: [line for line in srun_calls if f"--nodelist={node}|" in line] for node in ("alpha", "beta")}
    assert on["alpha"] and on["beta"] and len(srun_calls) == len(on["alpha"]) + len(on["beta"])
    assert "$" not in "".join(srun_calls)
    from_router = any("http://beta:8002" in line for line in on["alpha"])
    assert from_router if "--disaggregate" in words else any("alpha" in line for line in on["beta"])


@pytest.mark.parametrize(("words", "message"), [
    (["vllm", "--gpus", "h100x1", "--emit", "helm"], "--emit is 'helm', which is unknown"),
    (["vllm", "--gpus", "h100x4", "--nodes", "2", "--tp", "8", "--emit", "compose"], "Compose runs on one machine"),
    (["sglang", "--gpus", "h100x1", "--emit", "kuberay"], "is for one vLLM server on GPUs"),
    (["vllm", "--gpus", "none", "--emit", "kuberay"], "is for one vLLM server on GPUs"),
    (["vllm", "--gpus", "h100x1", "--emit", "kuberay"], "which Ray's pods do not see"),
    (["xllm", "--gpus", "ascend-910bx2", "--tp", "2", "--emit", "k8s"], "a command before the server"),
])  # fmt: skip
def test_impossible_files_are_refused(model: str, capsys: Capture, words: list[str], message: str) -> None:
    assert main(["launch", words[0], model, *words[1:]]) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("document", [
    {"a": "yes", "b": "1", "c": "null", "d": "~", "e": "", "f": " x", "g": "a: b", "h": "#", "i": "0x1f"},
    {"text": "one\n  two\n\nthree\n", "odd": "\n x\n", "tab": "a\tb\nc\n", "blank": "a \nb\n", "no end": "a\nb"},
    {"list": [{"a": {"b": [1, 2.5, True, None]}, "c": []}, {}, [["x"], "y"]], "empty": {}},
    {"ключ": "\u2028 \x85 emoji 🙂", "quote": 'it\'s "so"', "on": "off", "-": "- a", "?": "?x", "!": "&a *b"},
    [{"a": 1}, "b", ["c"]],
])  # fmt: skip
def test_yaml_round_trips(document: Any) -> None:
    assert yaml.safe_load(dump_yaml(document)) == document
