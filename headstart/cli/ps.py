"""`headstart ps`: models in the memory of a server that runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headstart.cli.options import OptionGroup, OutputOptions, option
from headstart.cli.render import finish, print_table

EXAMPLES = ("headstart ps", "headstart ps --url http://localhost:9000 --json")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(OptionGroup):
    """Where the server is."""

    url: str = option("Address of the server.", default="http://127.0.0.1:8000")
    api_key: str | None = option("Bearer token that the server wants. Or $HEADSTART_API_KEY.")


def run(*, server: ServerOptions, output: OutputOptions) -> int:
    """List the models in the memory of a server that runs, when they leave it, and its replicas."""
    from headstart.tools import loaded

    return finish(loaded.ps(server.url, server.api_key), output.as_json, _print)


def _print(data: dict[str, Any]) -> None:
    from headstart.tools.loaded import until

    if not data["models"]:
        print("no model is in memory")
        return
    rows = [
        (each["name"], f"{each['bytes'] / 1e6:.0f} MB", each["context"], until(each["expires_at"]))
        for each in data["models"]
    ]
    print_table(("model", "weights", "context", "leaves"), rows)
    if data["replicas"]:
        print()
        print_table(
            ("replica", "state", "runs", "waits", "starts", "cpus", "process", "address"),
            [_replica(each) for each in data["replicas"]],
        )


def _replica(each: dict[str, Any]) -> tuple[Any, ...]:
    runs, waits = ("" if each[name] is None else f"{each[name]:.0f}" for name in ("running", "waiting"))
    cpus = ",".join(map(str, each["cpus"])) or "any"
    return (each["number"], each["state"], runs, waits, each["starts"], cpus, each["pid"], each["url"])
