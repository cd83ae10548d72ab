"""Files for Compose, Slurm, Kubernetes and KubeRay: read back as those who run them read them."""

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


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object with these keys and no others."""
    return {"type": "object", "required": [*required], "properties": properties, "additionalProperties": False}


def several(items: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


CONTAINER = closed(
    "name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}, image=TEXT, command=several(TEXT),
    env=several(closed("name", name=TEXT, value=TEXT, valueFrom=ANY)), resources=ANY, volumeMounts=several(ANY),
    ports=several(ANY | {"required": ["containerPort"]}), startupProbe=ANY, readinessProbe=ANY, livenessProbe=ANY,
)  # fmt: skip
POD = closed("containers", containers=several(CONTAINER, 1), volumes=several(ANY | {"required": ["name"]}))
TEMPLATE = closed("spec", metadata=ANY, spec=POD)
GROUP = closed(
    "groupName", "maxReplicas", "minReplicas", "template", groupName=TEXT, replicas=NUMBER, minReplicas=NUMBER,
    maxReplicas=NUMBER, template=TEMPLATE, rayStartParams=ANY,
)  # fmt: skip
WORKERS = closed(
    "workerTemplate", size=NUMBER | {"minimum": 1}, leaderTemplate=TEMPLATE, workerTemplate=TEMPLATE,
    restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
)  # fmt: skip
RAY_HEAD = closed("template", rayStartParams=ANY | {"additionalProperties": TEXT}, template=TEMPLATE)
CLUSTER = closed("headGroupSpec", rayVersion=TEXT, headGroupSpec=RAY_HEAD, workerGroupSpecs=several(GROUP))
STRATEGY = closed(type={"enum": ["Recreate", "RollingUpdate"]})
PORTS = several(ANY | {"required": ["port"], "properties": {"port": NUMBER, "targetPort": NUMBER}})
SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io/v1",
                        closed("leaderWorkerTemplate", replicas=NUMBER, leaderWorkerTemplate=WORKERS)),
    "Deployment": ("apps/v1", closed("selector", "template", replicas=NUMBER, selector=ANY, template=TEMPLATE,
                                     strategy=STRATEGY)),
    "Service": ("v1", ANY | {"required": ["selector", "ports"], "properties": {"ports": PORTS}}),
    "RayService": ("ray.io/v1", closed("rayClusterConfig", serveConfigV2=TEXT, rayClusterConfig=CLUSTER)),
}  # fmt: skip
"""API version, and what the published schemas of these kinds ask of the parts that are written."""


def emitted(capsys: Capture, *words: str) -> str:
    assert main(["launch", *words]) == 0
    return capsys.readouterr().out


def objects(text: str) -> list[dict[str, Any]]:
    """The documents, each as its schema wants it."""
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
def test_a_server_on_two_nodes_is_a_leader_and_workers(model: str, capsys: Capture, engine: str) -> None:
    text = emitted(capsys, engine, model, "--gpus", "h100x4", "--nodes", "2", "--tp", "8", "--emit", "k8s")
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


def test_prefill_and_decode_reach_each_other_by_their_services(model: str, capsys: Capture) -> None:
    found = objects(emitted(capsys, "vllm", model, "--gpus", "h100x2", "--disaggregate", "1:1", "--emit", "k8s"))
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert names == [(kind, name) for name in ("prefill-0", "decode-0", "router") for kind in ("Deployment", "Service")]
    prefill, router = (containers(found[place], "template") for place in (0, 4))
    environment = {each["name"]: each.get("value") for each in prefill["env"]}
    assert next(iter(environment)) == "POD_IP" and environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
    assert "CUDA_VISIBLE_DEVICES" not in environment  # a pod sees its own devices alone
    assert prefill["command"][prefill["command"].index("--host") + 1] == "0.0.0.0"
    assert "--prefill http://prefill-0:8000 --decode http://decode-0:8000" in " ".join(router["command"])
    assert "resources" not in router and found[5]["spec"]["ports"][0]["port"] == 8000


def test_a_table_of_depths_is_a_config_map(model: str, capsys: Capture) -> None:
    words = ["sglang", model, "--gpus", "h100x1", "--depth-by-batch", "[[1, 4, 3], [5, 64, 0]]", "--emit", "k8s"]
    config, deployment, _ = objects(emitted(capsys, *words))
    assert config["kind"] == "ConfigMap" and "adaptive.json" in config["data"]
    container = containers(deployment, "template")
    assert "/config/adaptive.json" in container["command"]
    assert any(mount["mountPath"] == "/config" for mount in container["volumeMounts"])


def test_kuberay_has_the_engines_arguments_by_their_names(model: str, capsys: Capture) -> None:
    (service,) = objects(emitted_of_a_repo(capsys, model, "--emit", "kuberay", "--nodes", "2", "--tp", "8"))
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    (config,) = application["args"]["llm_configs"]
    assert config["model_loading_config"] == {"model_id": "org/model", "model_source": "org/model"}
    drafting = {"method": "mtp", "num_speculative_tokens": 3}
    assert config["engine_kwargs"] == {"tensor_parallel_size": 8, "speculative_config": drafting,
                                       "distributed_executor_backend": "ray"}  # fmt: skip
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["replicas"] == 2


def emitted_of_a_repo(capsys: Capture, model: str, *words: str) -> str:
    """Of a repo of which only the config is read."""
    import headstart.tools.launch.model_facts as facts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts.hub, "config_file", lambda _: Path(model) / "config.json")
        return emitted(capsys, "vllm", "org/model", "--gpus", "h100x4", *words)


def test_a_repo_is_fetched_with_a_token_that_may_be_there(model: str, capsys: Capture) -> None:
    deployment, _ = objects(emitted_of_a_repo(capsys, model, "--emit", "k8s", "--tp", "1"))
    container = containers(deployment, "template")
    token = next(each for each in container["env"] if each["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"]["optional"] is True
    assert any(mount["name"] == "hf-cache" for mount in container["volumeMounts"])


def test_compose(model: str, capsys: Capture) -> None:
    words = ["vllm", model, "--gpus", "h100x2", "--disaggregate", "1:1", "--emit", "compose"]
    services = yaml.safe_load(emitted(capsys, *words))["services"]
    assert list(services) == ["prefill-0", "decode-0", "router"]
    assert services["router"]["depends_on"] == {key: {"condition": "service_healthy"} for key in list(services)[:2]}
    assert services["router"]["command"][1].endswith('exec "$$@"')  # Compose has variables of its own
    prefill = services["prefill-0"]
    assert prefill["environment"]["CUDA_VISIBLE_DEVICES"] == "0" and prefill["volumes"] == [f"{model}:{model}:ro"]
    assert "http://127.0.0.1:8001/health" in prefill["healthcheck"]["test"][-1]


@pytest.mark.parametrize("words", [
    "vllm --gpus h100x4 --nodes 2 --tp 8", "vllm --gpus h100x4 --nodes 2 --tp 8 --engine-version 0.11.0",
    "sglang --gpus h100x1 --nodes 2 --disaggregate 1:1",
])  # fmt: skip
def test_slurm_starts_every_command_on_its_node(model: str, capsys: Capture, tmp_path: Path, words: str) -> None:
    """The script is run, with srun and scontrol that say what they were asked: bash's own reading of the quotes."""
    script = tmp_path / "job.sh"
    engine, *options = words.split()
    script.write_text(emitted(capsys, engine, model, *options, "--emit", "slurm"))
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
    asked = calls.read_text().splitlines()
    on = {node: [line for line in asked if f"--nodelist={node}|" in line] for node in ("alpha", "beta")}
    assert on["alpha"] and on["beta"] and len(asked) == len(on["alpha"]) + len(on["beta"])
    assert "$" not in "".join(asked)
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
def test_what_cannot_be_written(model: str, capsys: Capture, words: list[str], message: str) -> None:
    assert main(["launch", words[0], model, *words[1:]]) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("document", [
    {"a": "yes", "b": "1", "c": "null", "d": "~", "e": "", "f": " x", "g": "a: b", "h": "#", "i": "0x1f"},
    {"text": "one\n  two\n\nthree\n", "odd": "\n x\n", "tab": "a\tb\nc\n", "blank": "a \nb\n", "no end": "a\nb"},
    {"list": [{"a": {"b": [1, 2.5, True, None]}, "c": []}, {}, [["x"], "y"]], "empty": {}},
    {"ключ": "\u2028 \x85 emoji 🙂", "quote": 'it\'s "so"', "on": "off", "-": "- a", "?": "?x", "!": "&a *b"},
    [{"a": 1}, "b", ["c"]],
])  # fmt: skip
def test_yaml_is_read_back_as_it_was(document: Any) -> None:
    assert yaml.safe_load(dump_yaml(document)) == document
