"""`headstart generate`, from the start of its process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from engines.process import Group
from engines.starter import Launched, Starter


def headstart_starter(name: str, arguments: Sequence[str], log: Path) -> Starter:
    """`headstart generate`: the first byte on stdout is the first token."""

    def launch(prompt: str, max_tokens: int) -> Launched:
        command = [
            sys.executable, "-m", "headstart.cli.main", "generate", *arguments,
            "--prompt", prompt, "--max-tokens", str(max_tokens),
        ]  # fmt: skip
        group = Group(command, log)

        def wait() -> None:
            assert group.process.stdout is not None
            if not group.process.stdout.read(1):
                raise group.failed(f"{name} printed nothing")

        return group, wait

    return Starter(name, launch, ends=True)
