"""Routers that exist: one address before several servers, prefixes kept together, what is down left out."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.tools.launch.launcher import Arguments, Program, Step, flags_of
from headstart.tools.launch.versions import Version, parse

WAIT_S = 3600
"""Large models take half an hour to load."""
LOOK_S = 5
"""A server that is down is left out, and one that is back is asked again, after two or three looks."""
COMMON = (
    "--host", "--port", "--worker-urls", "--policy", "--prefill-policy", "--decode-policy", "--prefill", "--decode",
    "--worker-startup-timeout-secs", "--health-check-interval-secs", "--prometheus-port",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Behind:
    """A server behind a router. `role`: prefill, decode, or empty; `bootstrap`: the port at which a prefill server
    tells of its caches, where the engine has one."""

    url: str
    role: str = ""
    bootstrap: int | None = None


class Router(Program):
    """One router: the first word of its command line is `program`."""

    divided = ""
    """The switch for prefill and decode apart."""
    launches: tuple[str, ...] = ()
    """Words between the program and its arguments."""

    def step(self, servers: Sequence[Behind], host: str, port: int, prometheus: int, version: Version) -> Step:
        """Prompts go where their beginnings are cached; in decode servers nothing is, so the load decides there."""
        arguments = Arguments(self, version)
        arguments.add("--host", host)
        arguments.add("--port", port)
        if any(each.role for each in servers):
            arguments.add(self.divided)
            for each in servers:
                arguments.add(f"--{each.role}", each.url)
                arguments.words += [str(each.bootstrap)] if each.bootstrap else []
            arguments.add("--prefill-policy", "cache_aware")
            several = sum(each.role == "decode" for each in servers) > 1
            arguments.add("--decode-policy", "power_of_two" if several else "round_robin")  # the former refuses one
        else:
            arguments.add("--worker-urls", servers[0].url)
            arguments.words += [each.url for each in servers[1:]]
            arguments.add("--policy", "cache_aware")
        arguments.add("--worker-startup-timeout-secs", WAIT_S)
        arguments.add("--health-check-interval-secs", LOOK_S)
        arguments.add("--prometheus-port", prometheus)
        words = (self.program, *self.launches, *arguments.words)
        return Step(words, "router", server="router", role="router", port=port)


class VllmRouter(Router):
    """`vllm-router`, of the package of that name."""

    name, title, program = "vllm_router", "vllm-router", "vllm-router"
    distributions = ("vllm_router",)
    newest = "0.1.17"
    divided = "--vllm-pd-disaggregation"
    flags = flags_of("vllm_router/router_args.py", *COMMON, divided)


class SglangRouter(Router):
    """`sglang-router launch`, of the package of that name."""

    name, title, program = "sglang_router", "sglang-router", "sglang-router"
    distributions = ("sglang_router",)
    newest = "0.3.2"
    divided, launches = "--pd-disaggregation", ("launch",)
    flags = flags_of("sglang_router/router_args.py", *COMMON, divided)


ROUTERS: dict[str, Router] = {each.name: each for each in (VllmRouter(), SglangRouter())}


def newest(router: Router) -> Version:
    return parse(router.newest)


def found(router: Router) -> str | None:
    """The router's program: beside this Python, else in PATH."""
    beside = Path(sys.executable).with_name(router.program)
    return str(beside) if beside.exists() else shutil.which(router.program)
