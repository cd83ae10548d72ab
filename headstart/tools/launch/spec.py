"""Data of a launch: the user's LaunchRequest, the complete LaunchSpec, and the LaunchPlan with its LaunchSteps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart import hub
from headstart.models.classify import DrafterKind
from headstart.tools.options import ServerFlags
from headstart.wording import flag_of

PLATFORMS = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "xpu": "Intel GPUs", "npu": "Ascend NPUs",
             "metal": "Apple's GPUs", "cpu": "a CPU alone"}  # fmt: skip
VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES",
           "xpu": "ZE_AFFINITY_MASK"}  # fmt: skip
"""Platform -> environment variable that selects the devices of a process."""


def option_flag(name: str) -> str:
    """Returns the flag of a field of LaunchRequest or of a common option."""
    return flag_of(name.removesuffix("_gb"))


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Degrees of parallelism of one server; `tensor`, `data` and `expert` are numbers of devices."""

    gpus: int = 0  # available on all nodes together; 0: a CPU
    tensor: int = 1
    data: int = 1
    expert: int = 1
    nodes: int = 1
    head_node: str = "HEAD_NODE"  # address of the first node


@dataclass(frozen=True, kw_only=True)
class LaunchRequest(ServerFlags):
    """Options that every launcher gets unchanged from the user."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # common options by name; True: a switch
    extra: Sequence[str] = ()  # the engine's own arguments


@dataclass(frozen=True, kw_only=True)
class ServerPlacement:
    """Where one server of a launch runs."""

    server: str = "server"  # name, such as prefill-0
    number: int = 0  # index among all servers
    node: int = 0
    address: str = "127.0.0.1"  # as other nodes reach the server
    devices: tuple[int, ...] = ()  # device indices on the node; empty: all
    cpus: tuple[tuple[int, ...], ...] = ()  # cores of each worker on a CPU; empty: the engine chooses


@dataclass(frozen=True, kw_only=True)
class LaunchSpec(LaunchRequest):
    depth: int  # 0: no drafting
    parallel: Parallelism = Parallelism()
    drafter: DrafterKind | None = None  # of `head`, or inside the checkpoint; None: the model's own MTP modules
    platform: str = "cuda"  # a key of PLATFORMS
    placement: ServerPlacement = ServerPlacement()

    @property
    def head_repo(self) -> hub.Repo | None:
        """The Hub repo that `head` denotes; None for a path."""
        return hub.repo_of(self.head) if self.head and hub.is_repo(self.head) else None

    @property
    def method(self) -> str:
        """The drafting method under vLLM's name, such as "mtp" or "eagle3"."""
        return self.drafter.method if self.drafter else "mtp"

    @property
    def depth_table(self) -> list[list[int]]:
        """Rows [smallest batch, largest batch, depth], ascending from batch size 1; no depth is above `depth`."""
        rows = sorted(json.loads(self.depth_by_batch)) if self.depth_by_batch else []
        if rows and rows[0][0] > 1:
            rows.insert(0, [1, rows[0][0] - 1, self.depth])
        return [[low, high, min(deep, self.depth)] for low, high, deep in rows]

    @property
    def depth_drafted(self) -> int:
        """Draft tokens per step of this server; 0 for a prefill server."""
        return 0 if self.role == "prefill" else self.depth

    @property
    def device_environment(self) -> dict[str, str]:
        """The environment variable that selects this server's devices; empty: all devices of the node, or a platform
        without such a variable."""
        if not self.placement.devices or self.platform not in VISIBLE:
            return {}
        return {VISIBLE[self.platform]: ",".join(map(str, self.placement.devices))}


@dataclass(frozen=True)
class LaunchStep:
    """One command of a plan."""

    words: tuple[str, ...]
    where: str = ""  # a label such as "node 1"
    in_container: bool = False  # a preparing step that runs in the engine's container, such as `ray start`
    environment: Mapping[str, str] = field(default_factory=dict)
    server: str = "server"  # steps with the same name form one server, with a step for each node or device
    role: str = ""  # prefill, decode, router, or empty
    node: int = 0
    port: int | None = None  # HTTP port; None: another step of the server listens


@dataclass(kw_only=True)
class LaunchPlan:
    before: list[LaunchStep] = field(default_factory=list)  # run once, before the servers
    serve: list[LaunchStep] = field(default_factory=list)  # the router comes last
    files: dict[str, str] = field(default_factory=dict)  # name -> text
    notes: list[str] = field(default_factory=list)  # for the user
    facts: dict[str, Any] = field(default_factory=dict)  # entries for arguments.EngineRule that no flag contains

    @property
    def engines(self) -> list[LaunchStep]:
        """The serving steps without the router."""
        return [step for step in self.serve if step.role != "router"]
