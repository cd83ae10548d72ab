"""Output of a launch for containers and clusters: `docker run` lines, and `--emit` files for Compose, Kubernetes,
KubeRay and Slurm. The files are filled in from the skeletons in manifests.yaml."""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Any

from headstart.errors import UsageError
from headstart.files import user_path
from headstart.tools.launch.arguments import parse_arguments, table_for, version_text
from headstart.tools.launch.fleet import router_of
from headstart.tools.launch.launcher import dump_yaml
from headstart.tools.launch.prepare import PreparedLaunch
from headstart.tools.launch.spec import PLATFORMS, LaunchStep

ADDRESSES = {"0.0.0.0": "", "::": "", "localhost": "127.0.0.1:"}  # --host -> address prefix of `docker run -p`
ROUTER_IMAGE = "python:3.12-slim"  # routers are Python packages
CACHE = "/root/.cache/huggingface"  # in the container
CONFIG = "/config"  # folder of LaunchPlan.files in the container


def _read(file: str) -> str:
    return resources.files("headstart.tools.launch").joinpath(file).read_text("utf-8")


@cache
def skeletons() -> dict[str, Any]:
    import yaml

    return dict(yaml.safe_load(_read("manifests.yaml")))


def shell_line(environment: Mapping[str, str], words: Sequence[str]) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(words)])


def documents(lines: Iterable[tuple[LaunchStep, str]]) -> list[dict[str, str]]:
    return [{"where": step.where, "command": line} for step, line in lines]


@dataclass(frozen=True, kw_only=True)
class ContainerSpec:
    step: LaunchStep
    image: str
    words: tuple[str, ...]
    folders: tuple[str, ...] = ()  # host paths, mounted at the same path
    fetches: bool = False  # the engine downloads the model: it needs HF_TOKEN and a cache volume

    @property
    def is_router(self) -> bool:
        return self.step.role == "router"


def containers_of(prepared: PreparedLaunch) -> list[ContainerSpec]:
    """Returns a container for each serving step. Raises UsageError without an image, or for a launch by mpirun."""
    launcher, facts, spec, plan = prepared.launcher, prepared.facts, prepared.spec, prepared.plan
    image = launcher.images[spec.platform].format(version=version_text(prepared.version))
    if not image:
        where = PLATFORMS[spec.platform]
        raise UsageError(f"{launcher.title} publishes no container image for {where}", "leave --docker out")
    if plan.serve[0].words[0] == "mpirun":
        hint = "run it under Slurm's own containers: srun --container-image"
        raise UsageError("mpirun does not reach into containers on other nodes", hint)
    fetches = not facts.local and not any(step.words[0] == "hf" for step in plan.before)
    made = (step.words[-1] for step in plan.before if not step.in_container)
    named = (facts.source if facts.local else None, spec.head, *made)
    local = {name: str(user_path(name).resolve()) for name in named if name and _is_path(name)}
    replaced = local | {name: f"{CONFIG}/{name}" for name in plan.files}

    def container(step: LaunchStep) -> ContainerSpec:
        if step.role == "router":
            package = f"{step.words[0]}=={router_of(step).newest}"
            install = ("sh", "-c", f'pip install -q {package} && exec "$@"', "sh")
            return ContainerSpec(step=step, image=ROUTER_IMAGE, words=(*install, *step.words))
        words = tuple(replaced.get(word, word) for word in step.words)
        return ContainerSpec(step=step, image=image, words=words, folders=tuple(local.values()), fetches=fetches)

    return [container(step) for step in plan.serve]


def _is_path(name: str) -> bool:
    return user_path(name).exists() or name.startswith((".", "/", "~")) or name.endswith("-mtp")


def container_commands(prepared: PreparedLaunch) -> dict[str, list[dict[str, str]]]:
    """Returns {"before": commands to run on the host first, "serve": a `docker run` line for each container}."""
    containers, before = containers_of(prepared), prepared.plan.before
    joins = {step.where: step for step in before if step.in_container}  # `ray start` commands
    lines = [(each.step, _docker_run(prepared, each, joins.pop(each.step.where, None))) for each in containers]
    own = [replace(containers[0], step=step, words=step.words) for step in joins.values()]
    lines += [(each.step, _docker_run(prepared, each)) for each in own]
    host = [(step, shell_line(step.environment, step.words)) for step in before if not step.in_container]
    return {"before": documents(host), "serve": documents(lines)}


def _docker_run(prepared: PreparedLaunch, container: ContainerSpec, before: LaunchStep | None = None) -> str:
    spec, plan = prepared.spec, prepared.plan
    shares_network = len(plan.serve) > 1 or spec.parallel.nodes > 1
    devices = [] if container.is_router else skeletons()["platforms"][spec.platform]["docker"]
    words = ["docker", "run", "--rm", "--ipc=host", *devices]
    address = ADDRESSES.get(spec.host, f"[{spec.host}]:" if ":" in spec.host else f"{spec.host}:")
    words += ["--network=host"] if shares_network else ["-p", f"{address}{spec.port}:{spec.port}"]
    words += [word for name, value in container.step.environment.items() for word in ("-e", f"{name}={value}")]
    words += [word for place in container.folders for word in ("-v", f"{place}:{place}:ro")]
    words += ["-e", "HF_TOKEN", "-v", f"hf-cache:{CACHE}"] if container.fetches else []
    files = () if container.is_router else plan.files
    words += [word for name in files for word in ("-v", f"./{name}:{CONFIG}/{name}:ro")]
    program, *rest = container.words
    if "--host" in rest and not shares_network:  # behind a published port
        rest[rest.index("--host") + 1] = "0.0.0.0"
    if before is None:
        return shlex.join([*words, "--entrypoint", program, container.image, *rest])
    both = f"{shlex.join(before.words)} && exec {shlex.join([program, *rest])}"
    return shlex.join([*words, "--entrypoint", "bash", container.image, "-c", both])


FIELD = re.compile(r"\{([a-z_]+)\}")
RANKS = {"--nnodes": "$(LWS_GROUP_SIZE)", "--node-rank": "$(LWS_WORKER_INDEX)"}  # flag -> LeaderWorkerSet variable
LEADER = "leaderworkerset.sigs.k8s.io/name"
RAY_IMAGE = "rayproject/ray-llm:2.52.0-py311-cu128"  # of KubeRay's own samples
RAY_VERSION, RAY_VLLM = "2.52.0", "0.11.0"  # Ray's version in RAY_IMAGE, and the oldest vLLM that it supports
RAY_SETS = frozenset({"--host", "--port", "--api-key", "--model"})  # flags that Ray Serve sets itself
Object = dict[str, Any]


def emit(prepared: PreparedLaunch, kind: str) -> str:
    """Returns the text of the file for `kind`, a key of KINDS. Raises UsageError for a launch that cannot run there."""
    head = "" if kind == "slurm" else "".join(f"# note: {note}\n" for note in prepared.plan.notes)
    return head + KINDS[kind](prepared)


def fill(skeleton: Any, values: Mapping[str, Any]) -> Any:
    """Replaces {name} in a skeleton by `values[name]`. A string that is only "{name}" becomes the value itself, of any
    type; within a longer string the value becomes text. Dictionary entries that become None are left out."""
    if isinstance(skeleton, dict):
        filled = {key: fill(item, values) for key, item in skeleton.items()}
        return {key: item for key, item in filled.items() if item is not None}
    if isinstance(skeleton, list):
        return [fill(item, values) for item in skeleton]
    if not isinstance(skeleton, str):
        return skeleton
    if alone := FIELD.fullmatch(skeleton):
        return values[alone[1]]
    return FIELD.sub(lambda found: str(values[found[1]]), skeleton)


def _object(skeleton: str, /, **values: Any) -> Object:
    return dict(fill(skeletons()[skeleton], values))


def _compose(prepared: PreparedLaunch) -> str:
    containers = containers_of(prepared)
    if any(each.step.node for each in containers):
        raise UsageError("Compose runs on one machine", "--emit slurm or k8s, or fewer --nodes")
    services = {_name(prepared, each.step): _compose_service(prepared, each) for each in containers}
    if "router" in services:
        engines = (name for name in services if name != "router")
        services["router"]["depends_on"] = {name: {"condition": "service_healthy"} for name in engines}
    document: Object = {"services": services}
    if files := prepared.plan.files:
        document["configs"] = {name.replace(".", "-"): {"content": text} for name, text in files.items()}
    if any(each.fetches for each in containers):
        document["volumes"] = {"hf-cache": {}}
    return dump_yaml(document)


def _compose_service(prepared: PreparedLaunch, container: ContainerSpec) -> Object:
    step = container.step
    words = [word.replace("$", "$$") for word in container.words]  # Compose has variables of its own
    environment = dict(step.environment) | ({"HF_TOKEN": "${HF_TOKEN:-}"} if container.fetches else {})
    service = _object("compose_service", image=container.image, entrypoint=words[:1], command=words[1:],
                      environment=environment or None)  # fmt: skip
    if not container.is_router:
        service |= {"ipc": "host", **fill(skeletons()["platforms"][prepared.spec.platform]["compose"], {})}
        url = f"http://127.0.0.1:{step.port}{prepared.launcher.health}"
        python, curl = ["python3", "-c", f"import urllib.request as u; u.urlopen('{url}')"], ["curl", "-f", url]
        has_python = prepared.launcher.name != "llamacpp"
        service["healthcheck"] = _object("compose_health", test=["CMD", *(python if has_python else curl)])
        if files := prepared.plan.files:
            service["configs"] = [{"source": name.replace(".", "-"), "target": f"{CONFIG}/{name}"} for name in files]
    mounts = [f"{place}:{place}:ro" for place in container.folders]
    mounts += [f"hf-cache:{CACHE}"] if container.fetches else []
    return service | ({"volumes": mounts} if mounts else {})


def _name(prepared: PreparedLaunch, step: LaunchStep) -> str:
    return prepared.launcher.name if step.server == "server" else step.server


def _kubernetes(prepared: PreparedLaunch) -> str:
    """Returns a Service and a workload for each server: a Deployment for one node, a LeaderWorkerSet for several.
    Raises UsageError for a launch with steps before the server, or with several processes on a node."""
    if prepared.plan.before:
        raise UsageError("this takes a command before the server, which a pod does not run", "--dry-run prints it")
    objects = [_object("config_map", files=dict(prepared.plan.files))] if prepared.plan.files else []
    for _, group in groupby(containers_of(prepared), key=lambda each: each.step.server):
        nodes = list(group)
        name, selector = _name(prepared, nodes[0].step).replace("_", "-"), {}
        if len(nodes) == 1:
            selector = {"app": name}
            objects.append(_object("deployment", name=name, pod=_pod(prepared, nodes[0], nodes[0].words)))
        elif [each.step.node for each in nodes] != list(range(len(nodes))):
            hint = "--emit slurm, or another engine"
            raise UsageError(f"{prepared.launcher.title} runs a process for each device, not for each pod", hint)
        else:
            selector = {LEADER: name, "role": "leader"}
            leader, worker = (_pod(prepared, each, _ranked(each.words)) for each in nodes[:2])
            objects.append(_object("leader_worker_set", name=name, size=len(nodes), leader=leader, worker=worker))
        objects.append(_object("service", name=name, selector=selector, port=nodes[0].step.port))
    return dump_yaml(*objects)


def _ranked(words: Sequence[str]) -> list[str]:
    return [RANKS.get(flag, word) for flag, word in zip(("", *words), words, strict=False)]


def _pod(prepared: PreparedLaunch, container: ContainerSpec, words: Sequence[str]) -> Object:
    """Returns the pod spec of one container; an engine's pod has /dev/shm in memory for its workers."""
    step, launcher = container.step, prepared.launcher
    mounts: list[tuple[str, str, Object]] = []
    if not container.is_router:
        mounts.append(("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}}))
        mounts += [(f"model-{n}", place, {"hostPath": {"path": place}}) for n, place in enumerate(container.folders)]
        if container.fetches:
            mounts.append(("hf-cache", CACHE, {"emptyDir": {}}))
        if prepared.plan.files:
            mounts.append(("config", CONFIG, {"configMap": {"name": "launch"}}))
    token = [_object("hf_token")] if container.fetches else []
    variables = [{"name": name, "value": value} for name, value in step.environment.items()]
    made = _object(
        "container",
        name=step.role or launcher.name.replace("_", "-"),
        image=container.image,
        command=list(words),
        env=[_object("pod_ip"), *token, *variables],  # POD_IP first: others refer to it
        resources=None if container.is_router else _resources(prepared, prepared.spec.platform),
    )
    if step.port is not None:
        made |= _object("container_http", port=step.port, health="/health" if container.is_router else launcher.health)
    if not mounts:
        return {"containers": [made]}
    made["volumeMounts"] = [{"name": name, "mountPath": place} for name, place, _ in mounts]
    return {"containers": [made], "volumes": [{"name": name, **source} for name, _, source in mounts]}


def _resources(prepared: PreparedLaunch, platform: str) -> Object | None:
    parallel = prepared.spec.parallel
    count = -(-parallel.tensor * parallel.data // parallel.nodes) if parallel.gpus else 0
    return {"limits": {skeletons()["platforms"][platform]["resource"]: str(count)}} if count else None


def _kuberay(prepared: PreparedLaunch) -> str:
    """Returns a RayService with vLLM's arguments under their names in Ray Serve. Raises UsageError for other engines,
    several servers, a CPU or a local model."""
    launcher, facts, parallel = prepared.launcher, prepared.facts, prepared.spec.parallel
    if launcher.name != "vllm" or not parallel.gpus or len(prepared.plan.serve) > 1:
        raise UsageError("--emit kuberay is for one vLLM server on GPUs", "--emit k8s for anything else")
    if facts.local:
        raise UsageError(f"{facts.source} is a folder here, which Ray's pods do not see", "name a repo of the Hub")
    table = table_for(launcher.name, prepared.version)
    assert table is not None
    values = parse_arguments(table, launcher.arguments_of(prepared.plan.serve[0])).values
    arguments = {name.lstrip("-").replace("-", "_"): each for name, each in values.items() if name not in RAY_SETS}
    served = arguments.pop("served_model_name", facts.source)
    name = served[0] if isinstance(served, list) else served
    config = _object("ray_serve_config", name=name, source=facts.source, arguments=arguments)
    head, worker = (
        {"name": name, "image": RAY_IMAGE, "env": [_object("hf_token")], **resources}
        for name, resources in (("ray-head", {}), ("ray-worker", {"resources": _resources(prepared, "cuda")}))
    )
    service = {"serve_config": dump_yaml(config), "ray_version": RAY_VERSION, "num_workers": parallel.nodes}
    return dump_yaml(_object("ray_service", **service, head=head, worker=worker))


def _slurm(prepared: PreparedLaunch) -> str:
    """Returns a batch script for sbatch, with one srun for each command."""
    plan, spec, parallel = prepared.plan, prepared.spec, prepared.spec.parallel
    num_nodes = max(parallel.nodes, *(1 + step.node for step in (*plan.before, *plan.serve)))
    num_gpus = len({step.server for step in plan.engines}) * parallel.tensor * parallel.data if parallel.gpus else 0
    gres, per_node = skeletons()["platforms"].get(spec.platform, {}).get("gres"), -(-num_gpus // num_nodes)
    joins = []
    for step in (each for each in plan.before if each.in_container):
        joins += [f"on {node} {_slurm_line(step)}" for node in (range(step.node, num_nodes) if step.node else (0,))]
    before = [_slurm_line(step) for step in plan.before if not step.in_container] + joins
    values = {
        "name": f"headstart-{prepared.launcher.name}",
        "nodes": num_nodes,
        "gres": f"#SBATCH --gres={gres}:{per_node}\n" if per_node and gres else "",
        "notes": "".join(f"# note: {note}\n" for note in plan.notes),
        "port": plan.serve[-1].port if plan.serve[-1].role == "router" else spec.port,
        "files": "".join(f"cat > {name} <<'EOF'\n{text}EOF\n" for name, text in plan.files.items()),
        "before": "".join(f"{line}\n" for line in before) + ("sleep 10\n" if joins else ""),
        "serve": "\n".join(f"on {step.node} {_slurm_line(step)}" for step in plan.serve),
    }
    return str(fill(_read("slurm.sh"), values))


def _slurm_line(step: LaunchStep) -> str:
    environment = [f"{name}={_quoted(value)}" for name, value in step.environment.items()]
    return " ".join([*(["env", *environment] if environment else []), *map(_quoted, step.words)])


def _quoted(word: str) -> str:
    """Quotes a word for the shell, which still expands ${NODES[i]}."""
    if "${NODES[" not in word:
        return shlex.quote(word)
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`") + '"'


Emitter = Callable[[PreparedLaunch], str]
KINDS: Mapping[str, Emitter] = {"compose": _compose, "k8s": _kubernetes, "kuberay": _kuberay, "slurm": _slurm}
