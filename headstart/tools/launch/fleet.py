"""Several servers behind a router: copies of one model, or prefill and decode apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headstart import machine
from headstart.errors import UsageError
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.launcher import Launcher, Parallelism, Place, Plan, Step, Wanted
from headstart.tools.launch.parallelism import Devices, Room, cores_of_workers, divide
from headstart.tools.launch.routers import ROUTERS, Behind, Router, newest
from headstart.tools.launch.versions import Version

EVERYWHERE = "0.0.0.0"
COPIES = "vllm_router"
"""The router for copies of any engine."""


@dataclass(frozen=True)
class Roles:
    """Servers of a fleet."""

    copies: int = 1
    prefill: int = 0
    decode: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The role of each, in order."""
        if self.prefill:
            return ("prefill",) * self.prefill + ("decode",) * self.decode
        return ("",) * self.copies


def parse_roles(text: str) -> Roles:
    """`2:1`: two servers for prompts, one for tokens. Raises UsageError."""
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not found or not int(found[1]) or not int(found[2]):
        what = f"--disaggregate is {text!r}, but says how many prefill and decode servers there are"
        raise UsageError(what, "for example --disaggregate 1:1")
    return Roles(prefill=int(found[1]), decode=int(found[2]))


@dataclass(frozen=True)
class Site:
    """Where the commands of a plan run: on this machine and others (empty), or what --emit writes them for."""

    kind: str = ""
    head_node: str = "HEAD_NODE"

    @property
    def in_pods(self) -> bool:
        return self.kind in ("k8s", "kuberay")

    def first(self) -> str:
        """Where the first of several nodes of one server is found by the others."""
        if self.kind == "k8s":
            return "$(LWS_LEADER_ADDRESS)"
        return "${NODES[0]}" if self.kind == "slurm" else self.head_node

    def address(self, node: int, nodes: int) -> str:
        """Of a machine, as servers on others reach it."""
        if self.in_pods:
            return "$(POD_IP)"
        if self.kind == "slurm":
            return f"${{NODES[{node}]}}"
        if nodes == 1:
            return "127.0.0.1"
        return f"NODE_{node}" if node else self.head_node

    def url(self, server: str, place: Place, port: int) -> str:
        """Of a server, as the router reaches it."""
        return f"http://{server if self.in_pods else place.address}:{port}"


def placed(wanted: Wanted, site: Site) -> Wanted:
    """One server: on a CPU with cores for each of its workers."""
    parallel = wanted.parallel
    nodes = max(parallel.nodes, 1)
    place = Place(address=site.address(0, nodes), cpus=_cpus(parallel.tensor * parallel.data, wanted, site))
    return replace(wanted, place=place, host=EVERYWHERE if site.in_pods else wanted.host)


def _cpus(workers: int, wanted: Wanted, site: Site) -> tuple[tuple[int, ...], ...]:
    if wanted.platform != "cpu" or site.kind:  # elsewhere other cores are there
        return ()
    nodes = machine.nodes()
    return cores_of_workers(workers, len(nodes), [cpus[0] for cpus in machine.cores(nodes)])


@dataclass(frozen=True, kw_only=True)
class Share:
    """What each server of a fleet gets: devices of one node, and how it divides the model over them."""

    parallel: Parallelism
    on_node: int
    nodes: int

    def place(self, number: int) -> tuple[int, tuple[int, ...]]:
        """The node of a server, and its devices there."""
        size = self.parallel.tensor * self.parallel.data
        node, place = divmod(number, self.on_node)
        return node, tuple(range(place * size, (place + 1) * size)) if self.parallel.gpus else ()


def share(
    facts: Facts, devices: Devices, servers: int, *, nodes: int, tp: int | None, dp: int | None, room: Room
) -> tuple[Share, list[str]]:
    """Devices of each of so many servers, none of which spans nodes. Raises UsageError or CapacityError."""
    if not devices.count:
        parallel, notes = divide(facts, devices, nodes=nodes, tp=tp, dp=dp, room=room)
        return Share(parallel=parallel, on_node=servers, nodes=1), notes
    on_each = -(-servers // nodes)
    size = (tp or 1) * (dp or 1) if tp else devices.count // on_each
    if not size or size > devices.count or devices.count // size * nodes < servers:
        what = f"{servers} servers of {size or 1} GPUs do not fit on {nodes} x {devices.count} GPUs"
        raise UsageError(what, "a server does not span nodes here: more --nodes, or a smaller --tp")
    own = replace(devices, count=size)
    parallel, notes = divide(facts, own, nodes=1, tp=tp, dp=dp, room=room)
    on_node = devices.count // (parallel.tensor * parallel.data)
    return Share(parallel=parallel, on_node=on_node, nodes=-(-servers // on_node)), notes


def fleet(
    launcher: Launcher, facts: Facts, wanted: Wanted, version: Version, roles: Roles, share: Share, site: Site
) -> Plan:
    """The servers of all roles, and their router, which listens where one server would."""
    router = _router(launcher, roles)
    if wanted.settings.get("ssl_certfile"):
        raise UsageError("--ssl-certfile cannot go with several servers", "let a proxy before the router do that")
    plan, behind = Plan(), []
    members = list(_members(launcher, wanted, roles, share, site))
    for each in members:
        made = launcher.plan(facts, each, version)
        _add(plan, made, each, share.nodes)
        bootstrap = launcher.bootstrap + each.place.number if launcher.bootstrap and each.role == "prefill" else None
        url = site.url(each.place.server, each.place, each.port)
        behind.append(Behind(url=url, role=each.role or "", bootstrap=bootstrap))
    host = EVERYWHERE if site.in_pods else wanted.host
    prometheus = wanted.port + len(members) + 1
    plan.serve.append(router.step(behind, host, wanted.port, prometheus, newest(router)))
    return plan


def _router(launcher: Launcher, roles: Roles) -> Router:
    if not roles.prefill:
        return ROUTERS[COPIES]
    if not launcher.divided:
        raise UsageError(f"{launcher.title} cannot run prefill and decode apart from here", "vllm and sglang can")
    return ROUTERS[launcher.divided]


def _members(launcher: Launcher, wanted: Wanted, roles: Roles, share: Share, site: Site) -> Iterator[Wanted]:
    names = roles.names
    workers = share.parallel.tensor * share.parallel.data
    cpus = _cpus(workers * len(names), wanted, site)
    for number, role in enumerate(names):
        node, devices = share.place(number)
        place = Place(
            server=f"{role or 'copy'}-{names[:number].count(role)}",
            number=number,
            node=node,
            address=site.address(node, share.nodes),
            devices=() if site.in_pods else devices,
            cpus=cpus[number * workers : (number + 1) * workers],
        )
        yield replace(
            wanted,
            role=role or None,
            parallel=share.parallel,
            port=wanted.port if site.in_pods else wanted.port + 1 + number,
            host=wanted.host if place.address == "127.0.0.1" else EVERYWHERE,
            place=place,
        )


def _add(plan: Plan, made: Plan, member: Wanted, nodes: int) -> None:
    """The commands of one server, under its name; what all of them need once."""
    place = member.place
    where = f"{place.server} on node {place.node}" if nodes > 1 else place.server
    plan.before += [step for step in made.before if step not in plan.before]
    for step in made.serve:
        plan.serve.append(replace(step, where=where, server=place.server, role=member.role or "", node=place.node))
    plan.files |= made.files
    plan.facts |= made.facts
    plan.notes += [note for note in made.notes if note not in plan.notes]


def engines_of(steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if step.role != "router"]
