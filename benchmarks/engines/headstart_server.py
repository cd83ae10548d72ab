"""headstart as a process: `headstart serve` with requests and metrics, and the start of `headstart generate`."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from engines.process import Launched, ProcessGroup, Starter
from headstart.tools.client import Response, Server, get, post

COMPLETIONS = "/v1/completions"


class NotAnsweredError(Exception):
    """A failed request; the message has the response and the end of the log."""


class HeadstartServer:
    """`headstart serve` with these arguments. `cpus`: CPU list for taskset."""

    def __init__(self, arguments: Sequence[str], cpus: str | None = None) -> None:
        command = [sys.executable, "-m", "headstart", "serve", "--port", "0", *arguments]
        pinned = ["taskset", "-c", cpus, *command] if cpus else command
        self.process = subprocess.Popen(pinned, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"running on http://[^:]+:(\d+)", line):
                break
        else:
            sys.exit("the server did not start:\n" + "".join(self.log[-20:]))
        self.server = Server("127.0.0.1", int(found[1]))
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    @property
    def url(self) -> str:
        return str(self.server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    async def ask(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> Response:
        """Greedy and streamed unless `more` overrides it. Raises NotAnsweredError."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        answer = await post(self.server, COMPLETIONS, body | {"stream_options": {"include_usage": True}} | more)
        if answer.status != 200 or answer.broken:
            raise NotAnsweredError(f"{answer.status} {answer.body[:300]}\n" + "".join(self.log[-20:]))
        return answer

    def ask_all(self, prompts: Sequence[Sequence[int]], max_tokens: int, at_once: int = 1, **more: Any) -> list[Any]:
        """Answers in the order of the prompts, `at_once` requests at a time."""

        async def run() -> list[Response]:
            gate = asyncio.Semaphore(at_once)

            async def one(prompt: Sequence[int]) -> Response:
                async with gate:
                    return await self.ask(prompt, max_tokens, **more)

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

        return asyncio.run(run())

    def metrics(self) -> dict[str, float]:
        """Metric values by `name` or `name{label value}`."""
        text = asyncio.run(get(self.server, "/metrics")).body
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^([\w:]+)(?:{([^}]*)})? (\S+)$", text, re.MULTILINE):
            rest = [part for part in labels.split(",") if part and not part.startswith("model_name")]
            found[name + "".join(f"{{{part.partition('=')[2].strip(chr(34))}}}" for part in rest)] = float(value)
        return found


def headstart_starter(name: str, arguments: Sequence[str], log: Path) -> Starter:
    """`headstart generate`: the first byte on stdout is the first token."""

    def launch(prompt: str, max_tokens: int) -> Launched:
        more = ["--prompt", prompt, "--max-tokens", str(max_tokens)]
        group = ProcessGroup([sys.executable, "-m", "headstart", "generate", *arguments, *more], log)

        def wait() -> None:
            assert group.process.stdout is not None
            if not group.process.stdout.read(1):
                raise group.failed(f"{name} printed nothing")

        return group, wait

    return Starter(name, launch, ends=True)
