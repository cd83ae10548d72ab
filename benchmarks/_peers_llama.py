"""llama.cpp by its own programs and its own clocks.

Decoding: one llama-server per file; its `timings` leave out HTTP and the client. (predicted_n - 1) tokens in
predicted_ms: the clock starts when the first token is there. Prefill: llama-bench (random tokens, context empty).
Batches: llama-batched-bench (random tokens, no sampling).
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _peers_process import EngineFailed, Group, free_port

CONTEXT = 4096
START_SECONDS = 120
POLL_SECONDS = 0.002
HTTP_SECONDS = 600


class Server:
    """A llama-server on a free local port."""

    def __init__(self, llama_bin: Path, model: Path, threads: int, log: Path, more: Sequence[str] = ()) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.group = Group(
            [
                llama_bin / "llama-server", "-m", model, "--host", "127.0.0.1", "--port", str(port),
                "-t", str(threads), "-c", str(CONTEXT), "-np", "1", "--no-webui", *more,
            ],
            log,
            piped=False,
        )  # fmt: skip

    def wait(self) -> None:
        """Until the model is loaded. Raises EngineFailed."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.group.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=HTTP_SECONDS):
                    return
            except (urllib.error.URLError, ConnectionError):  # not listening yet, or 503 while it loads
                time.sleep(POLL_SECONDS)
        raise self.group.failed("llama-server did not start")

    def complete(self, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> dict[str, Any]:
        """One greedy completion; the server's JSON."""
        body = {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": ignore_eos,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{self.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=HTTP_SECONDS) as response:
                answer: dict[str, Any] = json.load(response)
        except OSError as error:
            raise self.group.failed(f"llama-server: {error}") from error
        return answer


class LlamaEngine:
    """One GGUF file."""

    def __init__(self, llama_bin: Path, weights: str, model: Path, threads: int, log: Path) -> None:
        self.name, self.weights, self.model = f"llama.cpp {weights}", weights, model
        self.about: dict[str, Any] = {"version": version(llama_bin), "file_bytes": model.stat().st_size}
        self._bin, self._threads, self._log = llama_bin, threads, log
        self._server: Server | None = None

    def start(self) -> None:
        """Nothing yet: only decoding needs a server."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        if self._server:
            self._server.group.resume()
        try:
            yield
        finally:
            if self._server:
                self._server.group.halt()

    def decode(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        if self._server is None:
            self._server = Server(self._bin, self.model, self._threads, self._log)
            self._server.wait()
        answer = self._server.complete(prompt, max_tokens)
        timings = answer["timings"]
        return {
            "num_tokens": timings["predicted_n"],
            "decode_s": timings["predicted_ms"] / 1e3,
            "token_ids": answer["tokens"],
            "text": answer["content"],
        }

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Of as many random tokens; llama-bench warms up with one run of its own."""
        result = self._tool("llama-bench", "-p", str(len(prompt)), "-n", "0", "-r", "1", "-o", "json")
        return {"num_tokens": len(prompt), "seconds": json.loads(result)[0]["avg_ns"] / 1e9}

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Of as many random prompts of the same length."""
        length, number = max(map(len, prompts)), len(prompts)
        result = self._tool(
            "llama-batched-bench", "-c", str(number * (length + max_tokens)), "-npp", str(length),
            "-ntg", str(max_tokens), "-npl", str(number), "--output-format", "jsonl",
        )  # fmt: skip
        found = [json.loads(line) for line in result.splitlines() if line.startswith("{")]
        if not found:
            raise EngineFailed(f"llama-batched-bench measured nothing for {number} x {length} tokens")
        tokens = number * max_tokens
        return {
            "num_tokens": tokens,
            "seconds": found[0]["t_pp"] + found[0]["t_tg"],
            "decode_tokens": tokens,
            "decode_s": found[0]["t_tg"],
        }

    def stop(self) -> None:
        if self._server:
            self._server.group.end()
            self._server = None

    def _tool(self, name: str, *arguments: str) -> str:
        command = [str(self._bin / name), "-m", str(self.model), "-t", str(self._threads), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise EngineFailed(f"{name} failed: {done.stderr[-500:]}")
        return done.stdout


def version(llama_bin: Path) -> str:
    """What llama-server says of itself."""
    done = subprocess.run([llama_bin / "llama-server", "--version"], capture_output=True, text=True)
    return " ".join((done.stderr + done.stdout).split())
