"""A plan's commands in the engine's own container images."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headstart.errors import UsageError
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.launcher import PLATFORMS, Launcher, Plan, Step, Wanted
from headstart.tools.launch.routers import ROUTERS
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
ROUTER_IMAGE = "python:3.12-slim"
"""Routers come as packages: what is pulled is the Python that they run on."""
CACHE = "/root/.cache/huggingface"
CONFIG = "/config"
Command = dict[str, str]
"""`where` it runs, and the `command`."""


def shell(environment: Mapping[str, str], words: list[str] | tuple[str, ...]) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(words)])


@dataclass(frozen=True, kw_only=True)
class Box:
    """One container: the words of its command, host folders that it sees (by the same path), and whether it fetches
    the model itself."""

    step: Step
    image: str
    words: tuple[str, ...]
    folders: tuple[str, ...] = ()
    fetches: bool = False
    devices: tuple[str, ...] = field(default=())


def containers(
    launcher: Launcher, version: Version, facts: Facts, wanted: Wanted, plan: Plan
) -> tuple[list[Command], list[Command]]:
    """What runs on the host before, and one container for each node or device. Raises UsageError where there is no
    image."""
    found = boxes(launcher, version, facts, wanted, plan)
    host = [{"where": step.where, "command": shell(step.environment, step.words)}
            for step in plan.before if not step.inside]  # fmt: skip
    first = {step.where: step for step in plan.before if step.inside}
    run = _Docker(wanted, tuple(plan.files), len(plan.serve) > 1 or wanted.parallel.nodes > 1)
    served = [
        {"where": box.step.where, "command": run.command(box, before=first.pop(box.step.where, None))} for box in found
    ]
    rest = (Box(step=step, image=found[0].image, words=step.words, folders=found[0].folders, fetches=found[0].fetches,
                devices=found[0].devices) for step in first.values())  # fmt: skip
    return host, [*served, *({"where": box.step.where, "command": run.command(box)} for box in rest)]


def boxes(launcher: Launcher, version: Version, facts: Facts, wanted: Wanted, plan: Plan) -> list[Box]:
    """The containers of a plan. Raises UsageError where there is no image."""
    image = launcher.images[wanted.platform].format(version=text_of(version))
    if not image:
        where = PLATFORMS[wanted.platform]
        raise UsageError(f"{launcher.title} publishes no container image for {where}", "leave --docker out")
    if plan.serve[0].words[0] == "mpirun":
        hint = "run it under Slurm's own containers: srun --container-image"
        raise UsageError("mpirun does not reach into containers on other nodes", hint)
    fetches = not facts.local and not any(step.words[0] == "hf" for step in plan.before)
    made = (step.words[-1] for step in plan.before if not step.inside)
    named = (facts.source if facts.local else None, wanted.head, *made)
    local = {name: str(Path(name).expanduser().resolve()) for name in named if name and _is_path(name)}
    found = []
    for step in plan.serve:
        if step.role == "router":
            found.append(Box(step=step, image=ROUTER_IMAGE, words=_installed(step)))
            continue
        words = tuple(f"{CONFIG}/{word}" if word in plan.files else local.get(word, word) for word in step.words)
        box = Box(step=step, image=image, words=words, folders=tuple(local.values()), fetches=fetches,
                  devices=DEVICES[wanted.platform])  # fmt: skip
        found.append(box)
    return found


def _is_path(name: str) -> bool:
    return Path(name).expanduser().exists() or name.startswith((".", "/", "~")) or name.endswith("-mtp")


def _installed(step: Step) -> tuple[str, ...]:
    """A router after its package."""
    router = next(each for each in ROUTERS.values() if each.program == step.words[0])
    package = f"{router.program}=={router.newest}"
    return ("sh", "-c", f'pip install -q {package} && exec "$@"', "sh", *step.words)


@dataclass(frozen=True)
class _Docker:
    """`docker run` for the containers of one plan; `together`: they share the host's network."""

    wanted: Wanted
    files: tuple[str, ...]
    together: bool

    def command(self, box: Box, before: Step | None = None) -> str:
        wanted, step = self.wanted, box.step
        words = ["docker", "run", "--rm", "--ipc=host", *box.devices]
        address = ADDRESSES.get(wanted.host, f"[{wanted.host}]:" if ":" in wanted.host else f"{wanted.host}:")
        words += ["--network=host"] if self.together else ["-p", f"{address}{wanted.port}:{wanted.port}"]
        for name, value in step.environment.items():
            words += ["-e", f"{name}={value}"]
        for place in box.folders:
            words += ["-v", f"{place}:{place}:ro"]
        if box.fetches:
            words += ["-e", "HF_TOKEN", "-v", f"hf-cache:{CACHE}"]
        for name in self.files if box.devices else ():
            words += ["-v", f"./{name}:{CONFIG}/{name}:ro"]
        program, *rest = self._listening(box.words)
        if before is None:
            return shlex.join([*words, "--entrypoint", program, box.image, *rest])
        both = f"{shlex.join(before.words)} && exec {shlex.join([program, *rest])}"
        return shlex.join([*words, "--entrypoint", "bash", box.image, "-c", both])

    def _listening(self, words: tuple[str, ...]) -> list[str]:
        """A server behind a published port listens on all addresses there."""
        found = list(words)
        if "--host" in found and not self.together:
            found[found.index("--host") + 1] = "0.0.0.0"
        return found
