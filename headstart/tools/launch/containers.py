"""A plan's commands in the engine's own container images."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from headstart.errors import UsageError
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.launcher import PLATFORMS, Launcher, Plan, Step, Wanted
from headstart.tools.launch.versions import Version, text_of

DEVICES = {
    "cuda": ("--gpus", "all"),
    "rocm": ("--device=/dev/kfd", "--device=/dev/dri", "--group-add=video", "--cap-add=SYS_PTRACE",
             "--security-opt=seccomp=unconfined"),
    "xpu": ("--device=/dev/dri",),
    "npu": ("--privileged", "-v", "/usr/local/Ascend/driver:/usr/local/Ascend/driver:ro", "-v",
            "/usr/local/sbin/npu-smi:/usr/local/sbin/npu-smi:ro"),
    "cpu": ("--security-opt=seccomp=unconfined", "--cap-add=SYS_NICE"),
}  # fmt: skip
"""What a container needs to see a platform's devices."""
ADDRESSES = {"0.0.0.0": "", "::": "", "localhost": "127.0.0.1:"}
"""Hosts to listen on, as a published port names them."""
Command = dict[str, str]
"""`where` it runs, and the `command`."""


def shell(environment: Mapping[str, str], words: list[str] | tuple[str, ...]) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(words)])


def containers(
    launcher: Launcher, version: Version, facts: Facts, wanted: Wanted, plan: Plan
) -> tuple[list[Command], list[Command]]:
    """What runs on the host before, and one container for each node or device. Raises UsageError where there is no
    image."""
    image = launcher.images[wanted.platform].format(version=text_of(version))
    if not image:
        where = PLATFORMS[wanted.platform]
        raise UsageError(f"{launcher.title} publishes no container image for {where}", "leave --docker out")
    if plan.serve[0].words[0] == "mpirun":
        hint = "run it under Slurm's own containers: srun --container-image"
        raise UsageError("mpirun does not reach into containers on other nodes", hint)
    run = _Container(image, facts, wanted, plan)
    host = [{"where": step.where, "command": shell(step.environment, step.words)}
            for step in plan.before if not step.inside]  # fmt: skip
    first = {step.where: step for step in plan.before if step.inside}
    served = [
        {"where": step.where, "command": run.command(step, before=first.pop(step.where, None))} for step in plan.serve
    ]
    return host, [*served, *({"where": step.where, "command": run.command(step)} for step in first.values())]


class _Container:
    """`docker run` for the commands of one plan."""

    def __init__(self, image: str, facts: Facts, wanted: Wanted, plan: Plan) -> None:
        self.image, self.wanted, self.files = image, wanted, plan.files
        self.together = len(plan.serve) > 1 or wanted.parallel.nodes > 1
        self.remote = not facts.local and not any(step.words[0] == "hf" for step in plan.before)
        made = (step.words[-1] for step in plan.before if not step.inside)
        named = (facts.source if facts.local else None, wanted.head, *made)
        self.local = {name: str(Path(name).expanduser().resolve()) for name in named if name and self._is_path(name)}

    @staticmethod
    def _is_path(name: str) -> bool:
        return Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.endswith("-mtp")

    def command(self, step: Step, before: Step | None = None) -> str:
        wanted = self.wanted
        words = ["docker", "run", "--rm", "--ipc=host", *DEVICES[wanted.platform]]
        address = ADDRESSES.get(wanted.host, f"[{wanted.host}]:" if ":" in wanted.host else f"{wanted.host}:")
        words += ["--network=host"] if self.together else ["-p", f"{address}{wanted.port}:{wanted.port}"]
        for name, value in step.environment.items():
            words += ["-e", f"{name}={value}"]
        for place in self.local.values():
            words += ["-v", f"{place}:{place}:ro"]
        if self.remote:
            words += ["-e", "HF_TOKEN", "-v", "hf-cache:/root/.cache/huggingface"]
        for name in self.files:
            words += ["-v", f"./{name}:/config/{name}:ro"]
        program, *rest = self._inside(step.words)
        if before is None:
            return shlex.join([*words, "--entrypoint", program, self.image, *rest])
        both = f"{shlex.join(before.words)} && exec {shlex.join([program, *rest])}"
        return shlex.join([*words, "--entrypoint", "bash", self.image, "-c", both])

    def _inside(self, words: tuple[str, ...]) -> list[str]:
        """Files by their places in the container; a server behind a published port listens on all addresses there."""
        found = [f"/config/{word}" if word in self.files else self.local.get(word, word) for word in words]
        if "--host" in found and not self.together:
            found[found.index("--host") + 1] = "0.0.0.0"
        return found
