"""A plan with what it was made from."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.tools.launch.detect import Installed, command
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.launcher import Launcher, Plan, Step, Wanted
from headstart.tools.launch.routers import ROUTERS, found
from headstart.tools.launch.versions import Version


@dataclass
class Prepared:
    """`wanted` is what one server, or each of several, was asked."""

    launcher: Launcher
    version: Version
    assumed: bool  # nothing was installed or named
    installed: Installed | None
    facts: Facts
    wanted: Wanted
    why_depth: str
    plan: Plan

    def commands(self) -> list[tuple[Step, list[str]]]:
        """The servers' commands with the programs that are really there, the router's last."""
        return [(step, self._command(step)) for step in self.plan.serve]

    def _command(self, step: Step) -> list[str]:
        if step.role == "router":
            router = next(each for each in ROUTERS.values() if each.program == step.words[0])
            return [found(router) or step.words[0], *step.words[1:]]
        return command(self.launcher, step.words, self.installed)
