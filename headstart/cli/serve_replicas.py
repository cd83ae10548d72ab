"""`headstart serve --replicas`, `--join`: several engines of one model on this machine, and a router elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headstart.cli.help import MORE
from headstart.cli.options import OptionGroup, option
from headstart.errors import UsageError

if TYPE_CHECKING:
    from headstart.config import EngineConfig
    from headstart.server.replicas.state import Member

OF_ONE_PROCESS = {
    "record": "one process writes records",
    "ssl_certfile": "the router speaks HTTP: let a proxy in front of it speak TLS",
}
"""Options of the server that replicas cannot have -> why."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(OptionGroup):
    """One model on several engines."""

    panel = "Several engines"

    replicas: str | None = option("Engines behind a router on this machine: a number, or numa.", metavar="N|numa")
    join: str | None = option(
        "Address of a router elsewhere that shall send requests here.", metavar="URL", panel=f"{MORE}{panel}, more"
    )
    replica: str | None = option("What --replicas tells its engines.", hidden=True)

    @property
    def member(self) -> Member | None:
        """Which replica this process is. Raises UsageError."""
        from headstart.server.replicas.state import Member

        return None if self.replica is None else Member.of(self.replica)


def begin(member: Member) -> int:
    """What a replica does first: it keeps to its CPUs, and ends with its supervisor. The bytes of its caches."""
    from headstart.system import end_with_parent, keep_to

    end_with_parent()
    fleet = member.fleet()
    if cpus := fleet.replicas[member.number].cpus:
        keep_to(cpus)
    return fleet.room


def check_alone(several: bool, other: bool) -> None:
    """Raises UsageError where replicas do not go with the rest."""
    if several:
        raise UsageError("--replicas serve one model", "leave out the others, or --replicas")
    if other:
        raise UsageError("--replicas are headstart's own engines", "leave out --engine, or --replicas")


def supervised(replicas: ReplicaOptions, config: EngineConfig, serving: dict[str, Any]) -> int:
    """Start them and stay. `serving`: ServeOptions by name. Raises UsageError."""
    from headstart import machine
    from headstart.server.logs import set_up_logs
    from headstart.server.replicas import join
    from headstart.server.replicas.router import check_installed
    from headstart.server.replicas.shares import MEMORY_SHARE, divide
    from headstart.server.replicas.supervisor import Settings, supervise
    from headstart.server.sockets import listening

    for name, why in OF_ONE_PROCESS.items():
        if serving.get(name):
            raise UsageError(f"--{name.replace('_', '-')} does not go with --replicas", why)
    if serving.get("role") == "prefill":
        raise UsageError(
            "--role prefill does not go with --replicas: a decode server asks one server for a prompt and its blocks",
            "start it by itself, and give the replicas its address: --prefill URL",
        )
    if config.device == "cuda":
        raise UsageError("--replicas are for the CPU", "one engine per GPU: headstart serve on each, with --join")
    assert replicas.replicas is not None
    shares = divide(replicas.replicas, config.threads, machine.nodes(), machine.threads().quota)
    check_installed()
    if replicas.join is not None:
        join.check(replicas.join, serving["host"])
    with listening(serving["host"], serving["port"]) as sockets:
        set_up_logs(serving["log_format"])
        return supervise(
            Settings(
                host=serving["host"],
                port=serving["port"],
                words=tuple(sys.argv[1:]),
                shares=shares,
                room=int(machine.memory().available * MEMORY_SHARE) // len(shares),
                origins=serving.get("allowed_origins", ()),
                shutdown_timeout=serving["shutdown_timeout"],
                join=replicas.join,
            ),
            sockets,
        )
