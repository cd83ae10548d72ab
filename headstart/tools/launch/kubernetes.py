"""A plan as Kubernetes objects: a Deployment for a server on one node, a LeaderWorkerSet for one on several; KubeRay.

Schemas: leaderworkerset.x-k8s.io/v1 of kubernetes-sigs/lws, ray.io/v1 of ray-project/kuberay.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from headstart.errors import UsageError
from headstart.tools.launch.checked import definitions_of
from headstart.tools.launch.containers import CACHE, CONFIG, Box
from headstart.tools.launch.definitions import resolve
from headstart.tools.launch.launcher import Step
from headstart.tools.launch.prepared import Prepared
from headstart.tools.launch.yaml import dumped

RESOURCES = {
    "cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu", "xpu": "gpu.intel.com/xe", "npu": "huawei.com/Ascend910",
}  # fmt: skip
"""Devices, as the plug-ins of their makers name them."""
GROUP_SIZE, RANK, LEADER = "$(LWS_GROUP_SIZE)", "$(LWS_WORKER_INDEX)", "leaderworkerset.sigs.k8s.io/name"
RANKS = {"--nnodes": GROUP_SIZE, "--node-rank": RANK}
"""Flags whose values a LeaderWorkerSet knows."""
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
TOKEN = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}}}
START_LOOKS = 360
"""Every ten seconds: large models take an hour at most to load."""
RAY_IMAGE = "rayproject/ray-llm:2.52.0-py311-cu128"
RAY_VERSION, RAY_VLLM = "2.52.0", "0.11.0"
"""An image of KubeRay's own samples, and the oldest vLLM that this Ray takes."""
OF_THE_SERVER = frozenset({"--host", "--port", "--api-key", "--model"})
Object = dict[str, Any]


def manifests(prepared: Prepared, boxes: Sequence[Box]) -> list[Object]:
    """A workload and a Service for each server, the router's last. Raises UsageError."""
    found: list[Object] = []
    if prepared.plan.before:
        raise UsageError("this takes a command before the server, which a pod does not run", "--dry-run prints it")
    if files := prepared.plan.files:
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "launch"}, "data": dict(files)})
    for server, group in groupby(boxes, key=lambda box: box.step.server):
        nodes = list(group)
        name = prepared.launcher.name.replace("_", "-") if server == "server" else server
        if len(nodes) == 1:
            found.append(_deployment(name, nodes[0], prepared))
            selector = {"app": name}
        else:
            found.append(_group(name, nodes, prepared))
            selector = {LEADER: name, "role": "leader"}
        found.append(_service(name, selector, nodes[0].step))
    return found


def _service(name: str, selector: Object, step: Step) -> Object:
    port = {"name": "http", "port": step.port, "targetPort": step.port, "protocol": "TCP"}
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"selector": selector, "ports": [port]},
    }  # fmt: skip


def _deployment(name: str, box: Box, prepared: Prepared) -> Object:
    """Its devices may hold one server only, so the old one goes before the new one comes."""
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _pod(box, prepared, box.words)},
        },
    }


def _group(name: str, nodes: Sequence[Box], prepared: Prepared) -> Object:
    """One server over several nodes. Raises UsageError for engines with a process for each device."""
    leader, worker, *_ = nodes
    if [box.step.node for box in nodes] != list(range(len(nodes))):
        hint = "--emit slurm, or another engine"
        raise UsageError(f"{prepared.launcher.title} runs a process for each device, not for each pod", hint)
    template = {
        "size": len(nodes),
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": {
            "metadata": {"labels": {"role": "leader"}}, "spec": _pod(leader, prepared, _ranked(leader.words)),
        },
        "workerTemplate": {"spec": _pod(worker, prepared, _ranked(worker.words))},
    }  # fmt: skip
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {"replicas": 1, "leaderWorkerTemplate": template},
    }


def _ranked(words: Sequence[str]) -> tuple[str, ...]:
    before = ("", *words)
    return tuple(RANKS.get(flag, word) for flag, word in zip(before, words, strict=False))


def _pod(box: Box, prepared: Prepared, words: Sequence[str]) -> Object:
    """One container; its shared memory is the node's, as engines' workers talk through it."""
    step, launcher = box.step, prepared.launcher
    container: Object = {"name": step.role or launcher.name.replace("_", "-"), "image": box.image,
                         "command": list(words), "env": _environment(box)}  # fmt: skip
    if step.port is not None:
        container["ports"] = [{"name": "http", "containerPort": step.port}]
        get = {"httpGet": {"path": "/health" if step.role == "router" else launcher.health, "port": "http"}}
        container["startupProbe"] = {**get, "periodSeconds": 10, "failureThreshold": START_LOOKS}
        container["readinessProbe"] = {**get, "periodSeconds": 5}
        container["livenessProbe"] = {**get, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}
    mounts: list[tuple[str, str, Object]] = []
    if box.devices:
        mounts.append(("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}}))
        mounts += [(f"model-{n}", place, {"hostPath": {"path": place}}) for n, place in enumerate(box.folders)]
        if box.fetches:
            mounts.append(("hf-cache", CACHE, {"emptyDir": {}}))
        if prepared.plan.files:
            mounts.append(("config", CONFIG, {"configMap": {"name": "launch"}}))
        if count := _devices(prepared):
            container["resources"] = {"limits": {RESOURCES[prepared.wanted.platform]: str(count)}}
    container["volumeMounts"] = [{"name": name, "mountPath": place} for name, place, _ in mounts]
    pod: Object = {"containers": [container], "volumes": [{"name": name, **source} for name, _, source in mounts]}
    if not mounts:
        del container["volumeMounts"], pod["volumes"]
    return pod


def _environment(box: Box) -> list[Object]:
    """POD_IP first: others refer to it."""
    named = [{"name": name, "value": value} for name, value in box.step.environment.items()]
    return [POD_IP, *([TOKEN] if box.fetches else []), *named]


def _devices(prepared: Prepared) -> int:
    """Of one pod."""
    parallel = prepared.wanted.parallel
    return -(-parallel.tensor * parallel.data // parallel.nodes) if parallel.gpus else 0


def kuberay(prepared: Prepared) -> list[Object]:
    """A RayService of Ray Serve's own vLLM deployment, with the engine's arguments by their names there."""
    launcher, facts, parallel = prepared.launcher, prepared.facts, prepared.wanted.parallel
    if launcher.name != "vllm" or not parallel.gpus or len(prepared.plan.serve) > 1:
        raise UsageError("--emit kuberay is for one vLLM server on GPUs", "--emit k8s for anything else")
    if facts.local:
        raise UsageError(f"{facts.source} is a folder here, which Ray's pods do not see", "name a repo of the Hub")
    known = definitions_of(launcher.name, prepared.version)
    assert known is not None
    found = resolve(known, launcher.words_of(prepared.plan.serve[0])).values
    values = {name.lstrip("-").replace("-", "_"): value for name, value in found.items() if name not in OF_THE_SERVER}
    served = values.pop("served_model_name", facts.source)
    name = served[0] if isinstance(served, list) else served
    config = {
        "model_loading_config": {"model_id": name, "model_source": facts.source},
        "engine_kwargs": values,
        "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
    }
    application = {"name": "llm", "import_path": "ray.serve.llm:build_openai_app", "route_prefix": "/",
                   "args": {"llm_configs": [config]}}  # fmt: skip
    worker = {
        "groupName": "devices", "replicas": parallel.nodes, "minReplicas": parallel.nodes,
        "maxReplicas": parallel.nodes, "rayStartParams": {}, "template": _ray_pod("ray-worker", _devices(prepared)),
    }  # fmt: skip
    head = {"rayStartParams": {"num-cpus": "0", "num-gpus": "0"}, "template": _ray_pod("ray-head", 0)}
    cluster = {"rayVersion": RAY_VERSION, "headGroupSpec": head, "workerGroupSpecs": [worker]}
    return [{
        "apiVersion": "ray.io/v1", "kind": "RayService", "metadata": {"name": "vllm"},
        "spec": {"serveConfigV2": dumped({"applications": [application]}), "rayClusterConfig": cluster},
    }]  # fmt: skip


def _ray_pod(name: str, devices: int) -> Object:
    container: Object = {"name": name, "image": RAY_IMAGE, "env": [TOKEN]}
    if devices:
        container["resources"] = {"limits": {RESOURCES["cuda"]: str(devices)}}
    return {"spec": {"containers": [container]}}
