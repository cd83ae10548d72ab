"""llama.cpp measured by its own programs and clocks, and copies of weights made by its tools.

Decoding: one llama-server per file; its `timings` exclude HTTP and the client ((predicted_n - 1) tokens in
predicted_ms, from the first token on). Prefill: llama-bench (random tokens, empty context). Batches:
llama-batched-bench (random tokens, no sampling).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from engines.process import EngineFailed, Launched, ServerProcess, Starter

CONTEXT = 4096
START_SECONDS, POLL_SECONDS = 120, 0.002
HTTP_SECONDS = 600
QUANTIZE_NAMES = {"Q8_0": "Q8_0", "bf16": "BF16"}
"""Names of weight types in benchmarks -> names in llama-quantize."""


class LlamaServer(ServerProcess):
    """llama-server with one slot."""

    def __init__(self, llama_bin: Path, model: Path, threads: int, log: Path, more: Sequence[str] = ()) -> None:
        command = [
            llama_bin / "llama-server", "-m", model, "--host", "127.0.0.1", "--port", "{port}", "-t", str(threads),
            "-c", str(CONTEXT), "-np", "1", "--no-webui", *more,
        ]  # fmt: skip
        super().__init__("llama-server", command, log)

    def complete(
        self, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False, num_probs: int = 0
    ) -> dict[str, Any]:
        """One greedy completion: the server's JSON, with log-probabilities of `num_probs` tokens per step."""
        body = {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": ignore_eos,
            "return_tokens": True,
            "n_probs": num_probs,
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
    """An engine with one GGUF file and options of llama-server."""

    def __init__(
        self, name: str, llama_bin: Path, model: Path, threads: int, log: Path, more: Sequence[str] = (),
        *, weights: str = "", ignore_eos: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.weights, self.model = name, weights, model
        self.about: dict[str, Any] = {
            "version": version(llama_bin), "file_bytes": model.stat().st_size, "options": list(more),
        }  # fmt: skip
        self._bin, self._threads, self._log, self._more, self._ignore_eos = llama_bin, threads, log, more, ignore_eos
        self._server: LlamaServer | None = None
        self.resident_mib = 0.0  # peak of the last tool run

    def start(self) -> None:
        """No-op: the server starts at the first decoding."""

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
            self._server = LlamaServer(self._bin, self.model, self._threads, self._log, self._more)
            self._server.wait(START_SECONDS, POLL_SECONDS)
        answer = self._server.complete(prompt, max_tokens, ignore_eos=self._ignore_eos)
        timings = answer["timings"]
        return {
            "num_tokens": timings["predicted_n"],
            "decode_s": timings["predicted_ms"] / 1e3,
            "token_ids": answer["tokens"],
            "text": answer["content"],
            "drafted": timings.get("draft_n", 0),
            "accepted": timings.get("draft_n_accepted", 0),
        }

    def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        """A prompt of as many random tokens; llama-bench has its own warm-up run."""
        result = self._tool("llama-bench", "-p", str(len(prompt)), "-n", "0", "-r", "1", "-o", "json")
        return {"num_tokens": len(prompt), "seconds": json.loads(result)[0]["avg_ns"] / 1e9}

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """As many random prompts of equal length."""
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
        with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=out, stderr=errors)
            _, status, used = os.wait4(process.pid, 0)  # reports the memory of one child, unlike getrusage
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0), errors.seek(0)
            if process.returncode:
                raise EngineFailed(f"{name} failed: {errors.read()[-500:]}")
            self.resident_mib = used.ru_maxrss / 1024
            return out.read()


def version(llama_bin: Path) -> str:
    """Version line of llama-server."""
    done = subprocess.run([llama_bin / "llama-server", "--version"], capture_output=True, text=True)
    return " ".join((done.stderr + done.stdout).split())


def llama_starter(
    name: str, llama_bin: Path, model: Path, threads: int, log: Path, chat: Callable[[str], list[int]],
    more: Sequence[str] = (),
) -> Starter:  # fmt: skip
    """llama-server: time to the first completion, requested as soon as the server is healthy."""

    def launch(prompt: str, max_tokens: int) -> Launched:
        server = LlamaServer(llama_bin, model, threads, log, more)

        def wait() -> None:
            server.wait(START_SECONDS, POLL_SECONDS)
            server.complete(chat(prompt), max_tokens)

        return server.group, wait

    return Starter(name, launch, ends=False)


def gguf_copy(llama_bin: Path, source: Path, work: Path, weights: str) -> Path:
    """Copy of `source` in Q8_0 or bf16 by llama-quantize, made once."""
    target = work / f"{source.stem}.{weights}.gguf"
    if not target.exists():
        unfinished = target.with_suffix(".unfinished")
        command = [llama_bin / "llama-quantize", "--allow-requantize", source, unfinished, QUANTIZE_NAMES[weights]]
        subprocess.run(command, check=True, capture_output=True)
        unfinished.rename(target)
    return target


def convert_to_gguf(args: argparse.Namespace, source: Path, more: Sequence[str] = ()) -> Path:
    """bfloat16 GGUF file of a Hugging Face directory by llama.cpp's script. Uses python, llama_source and work of
    args."""
    made: Path = args.work / f"{source.name}.bf16.gguf"
    if not made.exists() or made.stat().st_mtime < (source / "model.safetensors").stat().st_mtime:
        script = args.llama_source / "convert_hf_to_gguf.py"
        command = [args.python or sys.executable, script, source, "--outfile", made, "--outtype", "bf16", *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return made


def weights_files(llama_bin: Path | None, source: Path, work: Path, wanted: Sequence[str]) -> dict[str, Path]:
    """GGUF files by weight type: the source under its own type, and the wanted copies."""
    if llama_bin is None:
        return {}
    return {each: gguf_copy(llama_bin, source, work, each) if each in QUANTIZE_NAMES else source for each in wanted}
