"""`launch --emit`: the commands of a plan as files for what runs them on many machines."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from headstart.errors import UsageError
from headstart.tools.launch.containers import CACHE, CONFIG, Box, boxes
from headstart.tools.launch.kubernetes import kuberay, manifests
from headstart.tools.launch.launcher import Step
from headstart.tools.launch.prepared import Prepared
from headstart.tools.launch.yaml import dumped


def compose(prepared: Prepared) -> str:
    """Containers on one host's network; the router waits until its servers are healthy."""
    found = _boxes(prepared)
    if any(box.step.node for box in found):
        raise UsageError("Compose runs on one machine", "--emit slurm or k8s, or fewer --nodes")
    services = {_name(box, prepared): _service(box, prepared) for box in found}
    engines = [_name(box, prepared) for box in found if box.step.role != "router"]
    if "router" in services:
        services["router"]["depends_on"] = {name: {"condition": "service_healthy"} for name in engines}
    document: dict[str, Any] = {"services": services}
    if files := prepared.plan.files:
        document["configs"] = {_config(name): {"content": text} for name, text in files.items()}
    if any(box.fetches for box in found):
        document["volumes"] = {"hf-cache": {}}
    return dumped(document)


def _name(box: Box, prepared: Prepared) -> str:
    return prepared.launcher.name if box.step.server == "server" else box.step.server


def _config(name: str) -> str:
    return name.replace(".", "-")


def _service(box: Box, prepared: Prepared) -> dict[str, Any]:
    """Dollars are doubled, or Compose would put its own variables there."""
    step, platform = box.step, prepared.wanted.platform
    words = [word.replace("$", "$$") for word in box.words]
    service: dict[str, Any] = {
        "image": box.image,
        "entrypoint": words[:1],
        "command": words[1:],
        "network_mode": "host",
        "restart": "on-failure",
    }
    environment = dict(step.environment)
    mounts = [f"{place}:{place}:ro" for place in box.folders]
    if box.fetches:
        environment["HF_TOKEN"] = "${HF_TOKEN:-}"
        mounts.append(f"hf-cache:{CACHE}")
    if environment:
        service["environment"] = environment
    if box.devices:
        service |= {"ipc": "host", **_devices(platform)}
        probe = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{step.port}{prepared.launcher.health}')"
        ask = ["CMD", "python3", "-c", probe]
        if prepared.launcher.name == "llamacpp":  # an image without Python
            ask = ["CMD", "curl", "-f", f"http://127.0.0.1:{step.port}{prepared.launcher.health}"]
        service["healthcheck"] = {"test": ask, "interval": "10s", "timeout": "5s", "start_period": "1h"}
        if prepared.plan.files:
            service["configs"] = [
                {"source": _config(name), "target": f"{CONFIG}/{name}"} for name in prepared.plan.files
            ]
    if mounts:
        service["volumes"] = mounts
    return service


def _devices(platform: str) -> dict[str, Any]:
    """What DEVICES of containers.py says to `docker run`."""
    if platform == "cuda":
        device = {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}
    others: dict[str, dict[str, Any]] = {
        "rocm": {"devices": ["/dev/kfd", "/dev/dri"], "group_add": ["video"], "cap_add": ["SYS_PTRACE"],
                 "security_opt": ["seccomp=unconfined"]},
        "xpu": {"devices": ["/dev/dri"]},
        "npu": {"privileged": True},
        "cpu": {"security_opt": ["seccomp=unconfined"], "cap_add": ["SYS_NICE"]},
    }  # fmt: skip
    return others[platform]


GRES = {"cuda": "gpu", "rocm": "gpu", "xpu": "gpu", "npu": "npu"}
SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{gres}#SBATCH --output={name}-%j.log
{notes}
set -euo pipefail
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
echo "requests go to http://${{NODES[0]}}:{port}"
cd "$(mktemp -d -p "$SLURM_SUBMIT_DIR" {name}.XXXXXX)"
{files}on() {{ # NODE COMMAND...: beside what runs there already
  srun --overlap --nodes=1 --ntasks=1 --nodelist="${{NODES[$1]}}" "${{@:2}}" &
}}
{before}{serve}
# One that ends takes the job with it: the others would wait for it.
wait -n && code=$? || code=$?
echo "one of the servers has ended with code $code" >&2
exit "$code"
"""


def slurm(prepared: Prepared) -> str:
    """A batch script for sbatch: one srun for each command."""
    plan, wanted = prepared.plan, prepared.wanted
    nodes = 1 + max(step.node for step in (*plan.before, *plan.serve))
    nodes = max(nodes, wanted.parallel.nodes)
    per_node = -(-_gpus(prepared) // nodes)
    gres = f"#SBATCH --gres={GRES[wanted.platform]}:{per_node}\n" if per_node and wanted.platform in GRES else ""
    files = "".join(f"cat > {name} <<'EOF'\n{text}EOF\n" for name, text in plan.files.items())
    once = [_line(step) for step in plan.before if not step.inside]
    joined = [line for step in plan.before if step.inside for line in _joined(step, nodes)]
    return SLURM.format(
        name=f"headstart-{prepared.launcher.name}",
        nodes=nodes,
        gres=gres,
        notes="".join(f"# note: {note}\n" for note in plan.notes),
        port=wanted.port if plan.serve[-1].role != "router" else plan.serve[-1].port,
        files=files,
        before="".join(f"{line}\n" for line in (*once, *joined)) + ("sleep 10\n" if joined else ""),
        serve="\n".join(f"on {step.node} {_line(step)}" for step in plan.serve),
    )


def _gpus(prepared: Prepared) -> int:
    """Of all servers of the plan."""
    servers = {step.server for step in prepared.plan.serve if step.role != "router"}
    parallel = prepared.wanted.parallel
    return len(servers) * parallel.tensor * parallel.data if parallel.gpus else 0


def _joined(step: Step, nodes: int) -> list[str]:
    """What joins nodes, on each of those that it is for."""
    places = range(step.node, nodes) if step.node else (0,)
    return [f"on {node} {_line(step)}" for node in places]


def _line(step: Step) -> str:
    """Quoted for the shell, but for places of nodes, which it knows."""
    environment = [f"{name}={_quoted(value)}" for name, value in step.environment.items()]
    words = [_quoted(word) for word in step.words]
    return " ".join(["env", *environment, *words] if environment else words)


def _quoted(word: str) -> str:
    if "${NODES[" not in word:
        return shlex.quote(word)
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`") + '"'


def _boxes(prepared: Prepared) -> list[Box]:
    return boxes(prepared.launcher, prepared.version, prepared.facts, prepared.wanted, prepared.plan)


def _kubernetes(prepared: Prepared) -> str:
    return "---\n".join(map(dumped, manifests(prepared, _boxes(prepared))))


def _kuberay(prepared: Prepared) -> str:
    return "---\n".join(map(dumped, kuberay(prepared)))


KINDS: Mapping[str, Callable[[Prepared], str]] = {
    "compose": compose, "k8s": _kubernetes, "kuberay": _kuberay, "slurm": slurm,
}  # fmt: skip


def emitted(prepared: Prepared, kind: str) -> str:
    """The file's text. Raises UsageError for what cannot be run there."""
    head = "" if kind == "slurm" else "".join(f"# note: {note}\n" for note in prepared.plan.notes)
    return head + KINDS[kind](prepared)
