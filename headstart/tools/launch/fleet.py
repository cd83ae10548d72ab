"""Several servers behind a router: copies of one model, or prefill/decode disaggregation."""

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from headstart import machine
from headstart.errors import UsageError
from headstart.tools.launch.arguments import Version, parse_version
from headstart.tools.launch.launcher import CommandBuilder, EngineLauncher, EngineProgram
from headstart.tools.launch.model_facts import ModelFacts
from headstart.tools.launch.parallelism import Hardware, cores_of_workers, divide
from headstart.tools.launch.spec import LaunchPlan, LaunchSpec, LaunchStep, Parallelism, ServerPlacement

EVERYWHERE = "0.0.0.0"
STARTUP_TIMEOUT_S = 3600  # large models take half an hour to load
HEALTH_INTERVAL_S = 5  # time between a router's health checks; two or three of them decide


class RoutedServer(NamedTuple):
    url: str
    role: str = ""  # prefill, decode, or empty
    bootstrap_port: int | None = None  # of a prefill server; None if the engine has no bootstrap port


class RouterProgram(EngineProgram):
    """A router program: one address for several servers. It sends prompts with equal prefixes to the same server."""

    launches: tuple[str, ...] = ()  # words between the program and its arguments
    pd_flag = ""  # switch for prefill/decode disaggregation

    def step(self, servers: Sequence[RoutedServer], host: str, port: int, metrics_port: int) -> LaunchStep:
        """Returns the command of the router. Copies and prefill servers are chosen by cached prefix. Decode servers
        cache no prompts: they are chosen by load."""
        command = CommandBuilder(self, parse_version(self.newest))
        command.add_all({"--host": host, "--port": port})
        if any(each.role for each in servers):
            command.add(self.pd_flag)
            for each in servers:
                command.add(f"--{each.role}", each.url)
                command.words += [str(each.bootstrap_port)] if each.bootstrap_port else []
            several = sum(each.role == "decode" for each in servers) > 1
            decode_policy = "power_of_two" if several else "round_robin"  # power_of_two refuses a single server
            command.add_all({"--prefill-policy": "cache_aware", "--decode-policy": decode_policy})
        else:
            command.add("--worker-urls", servers[0].url)
            command.words += [each.url for each in servers[1:]]
            command.add("--policy", "cache_aware")
        command.add("--worker-startup-timeout-secs", STARTUP_TIMEOUT_S)
        command.add_all({"--health-check-interval-secs": HEALTH_INTERVAL_S, "--prometheus-port": metrics_port})
        words = (self.program, *self.launches, *command.words)
        return LaunchStep(words, "router", server="router", role="router", port=port)

    def installed_path(self) -> str | None:
        """Returns the path of the router beside this Python interpreter or in PATH; None if it is not installed."""
        beside = Path(sys.executable).with_name(self.program)
        return str(beside) if beside.exists() else shutil.which(self.program)


class VllmRouter(RouterProgram):
    name, title, program, newest = "vllm_router", "vllm-router", "vllm-router", "0.1.17"
    pd_flag = "--vllm-pd-disaggregation"


class SglangRouter(RouterProgram):
    name, title, program, newest = "sglang_router", "sglang-router", "sglang-router", "0.3.2"
    launches, pd_flag = ("launch",), "--pd-disaggregation"


ROUTERS: dict[str, RouterProgram] = {each.name: each for each in (VllmRouter(), SglangRouter())}
COPY_ROUTER = "vllm_router"  # the router for copies of any engine


def router_of(step: LaunchStep) -> RouterProgram:
    return next(each for each in ROUTERS.values() if each.program == step.words[0])


def parse_roles(text: str) -> tuple[str, ...]:
    """Returns the role of each server: "2:1" gives (prefill, prefill, decode). Raises UsageError for other texts."""
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not found or not int(found[1]) or not int(found[2]):
        what = f"--disaggregate is {text!r}, but takes the numbers of prefill and decode servers, PREFILL:DECODE"
        raise UsageError(what, "for example --disaggregate 1:1")
    return ("prefill",) * int(found[1]) + ("decode",) * int(found[2])


@dataclass(frozen=True)
class LaunchTarget:
    """Where the commands of a plan run, and the addresses that servers have there."""

    kind: str = ""  # value of --emit (containers.KINDS); empty: commands for this and other machines
    head_node: str = "HEAD_NODE"  # address of node 0, for an empty `kind`

    @property
    def in_pods(self) -> bool:
        return self.kind in ("k8s", "kuberay")

    def head_address(self) -> str:
        """Returns the address of node 0, for a server that spans nodes."""
        if self.kind == "k8s":
            return "$(LWS_LEADER_ADDRESS)"
        return "${NODES[0]}" if self.kind == "slurm" else self.head_node

    def address(self, node: int, num_nodes: int) -> str:
        if self.in_pods:
            return "$(POD_IP)"
        if self.kind == "slurm":
            return f"${{NODES[{node}]}}"
        return "127.0.0.1" if num_nodes == 1 else f"NODE_{node}" if node else self.head_node

    def url(self, spec: LaunchSpec) -> str:
        place = spec.placement
        return f"http://{place.server if self.in_pods else place.address}:{spec.port}"


def place_single(spec: LaunchSpec, target: LaunchTarget) -> LaunchSpec:
    """Returns the spec of a single server with its address, and on a CPU with the cores of each worker."""
    parallel = replace(spec.parallel, head_node=target.head_address())
    cpus = _worker_cpus(parallel.tensor * parallel.data, spec, target)
    placement = ServerPlacement(address=target.address(0, max(parallel.nodes, 1)), cpus=cpus)
    return replace(spec, parallel=parallel, placement=placement, host=EVERYWHERE if target.in_pods else spec.host)


def _worker_cpus(num_workers: int, spec: LaunchSpec, target: LaunchTarget) -> tuple[tuple[int, ...], ...]:
    if spec.platform != "cpu" or target.kind:  # other machines have other cores
        return ()
    nodes = machine.nodes()
    return cores_of_workers(num_workers, len(nodes), [cpus[0] for cpus in machine.cores(nodes)])


class ServerShare(NamedTuple):
    parallel: Parallelism  # of each server
    on_node: int  # servers on a node
    nodes: int  # nodes in use


def share_devices(facts: ModelFacts, hardware: Hardware, num_servers: int) -> tuple[ServerShare, list[str]]:
    """Divides the devices among `num_servers` equal servers, none of which spans nodes. Returns one server's share and
    notes for the user. Raises UsageError or CapacityError if the servers or the model do not fit."""
    devices, nodes, tp = hardware.devices, hardware.nodes, hardware.tp
    if not devices.count:
        parallel, notes = divide(facts, hardware)
        return ServerShare(parallel, num_servers, 1), notes
    size = tp * (hardware.dp or 1) if tp else devices.count // -(-num_servers // nodes)
    if not size or size > devices.count or devices.count // size * nodes < num_servers:
        what = f"{num_servers} servers of {size or 1} GPUs do not fit on {nodes} x {devices.count} GPUs"
        raise UsageError(what, "a server does not span nodes here: more --nodes, or a smaller --tp")
    parallel, notes = divide(facts, replace(hardware, devices=replace(devices, count=size), nodes=1))
    on_node = devices.count // (parallel.tensor * parallel.data)
    return ServerShare(parallel, on_node, -(-num_servers // on_node)), notes


def plan_servers(
    launcher: EngineLauncher, facts: ModelFacts, spec: LaunchSpec, version: Version, roles: Sequence[str],
    share: ServerShare, target: LaunchTarget,
) -> LaunchPlan:  # fmt: skip
    """Plans one server for each of `roles` ("" for a copy of the model), and the router, which listens on the port of
    `spec`. Raises UsageError for an engine without disaggregation, and for TLS."""
    if any(roles) and not launcher.pd_router:
        what = f"{launcher.title} has no router for prefill/decode disaggregation here"
        raise UsageError(what, "vllm and sglang have one")
    router = ROUTERS[launcher.pd_router if any(roles) else COPY_ROUTER]
    if spec.settings.get("ssl_certfile"):
        raise UsageError("--ssl-certfile cannot go with several servers", "let a proxy before the router do that")
    plan, servers = LaunchPlan(), list[RoutedServer]()
    for each in _member_specs(spec, roles, share, target):
        _add_member(plan, launcher.plan(facts, each, version), each, share.nodes)
        has_bootstrap = launcher.bootstrap_port and each.role == "prefill"
        port = (launcher.bootstrap_port or 0) + each.placement.number if has_bootstrap else None
        servers.append(RoutedServer(target.url(each), each.role or "", port))
    host = EVERYWHERE if target.in_pods else spec.host
    plan.serve.append(router.step(servers, host, spec.port, metrics_port=spec.port + len(servers) + 1))
    return plan


def _member_specs(
    spec: LaunchSpec, roles: Sequence[str], share: ServerShare, target: LaunchTarget
) -> Iterator[LaunchSpec]:
    num_workers = share.parallel.tensor * share.parallel.data
    cpus = _worker_cpus(num_workers * len(roles), spec, target)
    for number, role in enumerate(roles):
        node, place = divmod(number, share.on_node)
        devices = tuple(range(place * num_workers, (place + 1) * num_workers)) if share.parallel.gpus else ()
        placement = ServerPlacement(
            server=f"{role or 'copy'}-{roles[:number].count(role)}", number=number, node=node,
            address=target.address(node, share.nodes), devices=() if target.in_pods else devices,
            cpus=cpus[number * num_workers : (number + 1) * num_workers],
        )  # fmt: skip
        yield replace(
            spec,
            role=role or None,
            parallel=share.parallel,
            port=spec.port if target.in_pods else spec.port + 1 + number,
            host=spec.host if placement.address == "127.0.0.1" else EVERYWHERE,
            placement=placement,
        )


def _add_member(plan: LaunchPlan, made: LaunchPlan, member: LaunchSpec, num_nodes: int) -> None:
    """Adds the serving steps of one server to `plan`, and its preparing steps, files and notes if not there yet."""
    place = member.placement
    where = f"{place.server} on node {place.node}" if num_nodes > 1 else place.server
    plan.before += [step for step in made.before if step not in plan.before]
    for step in made.serve:
        plan.serve.append(replace(step, where=where, server=place.server, role=member.role or "", node=place.node))
    plan.files |= made.files
    plan.facts |= made.facts
    plan.notes += [note for note in made.notes if note not in plan.notes]
