"""headstart as a worker process: loads once, then measures on request.

    PYTHONPATH=benchmarks python benchmarks/engines/headstart_worker.py [MODEL] [engine options of `headstart generate`]

Times are headstart's own (`Completion.timing`), as `headstart generate` prints them.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import headstart
from engines.worker_protocol import serve, take_stdout
from headstart.api import LLM, Completion
from headstart.cli.options import LoadTestOptions
from headstart.cli.parser import command
from headstart.core import SamplingParams
from headstart.options import ModelOptions


class Worker:
    """Handlers of requests to one LLM."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def encode(self, texts: list[str]) -> dict[str, Any]:
        """Texts as user messages of the chat template."""
        return {"prompts": [self.llm.encode(text) for text in texts]}

    def decode(
        self, prompt: list[int], max_tokens: int, ignore_eos: bool = False, depth: int | None = None, seed: int = 0
    ) -> dict[str, Any]:
        """Greedy decoding of one prompt to its natural end. `depth` None: the engine's default."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, seed=seed)
        completion = self.llm.generate([prompt], params, depth=depth)[0]
        return {
            "num_tokens": len(completion.token_ids),
            "prompt_s": completion.timing["ttft_s"],
            "decode_s": completion.timing["decode_s"],
            "resident_mib": resident_mib(),
            "token_ids": completion.token_ids,
            "text": completion.text,
            **_drafting([completion]),
        }

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Time of a prompt to its first token."""
        completion = self.llm.generate([prompt], SamplingParams(max_tokens=1))[0]
        return {"num_tokens": len(prompt), "seconds": completion.timing["ttft_s"]}

    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """All prompts at once with exactly `max_tokens` each, timed from the call to the last token."""
        started = time.perf_counter()
        completions = self.llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        seconds = time.perf_counter() - started
        num_tokens = sum(len(each.token_ids) for each in completions)
        return {"num_tokens": num_tokens, "seconds": seconds, **_drafting(completions)}


def resident_mib() -> float:
    """Peak resident memory in MiB. getrusage would include the parent's memory at the fork."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def _drafting(completions: list[Completion]) -> dict[str, int]:
    stats = [each.speculation for each in completions]
    return {"drafts": sum(each.drafts for each in stats), "accepted": sum(each.accepted for each in stats)}


@command()
def run(named: ModelOptions, engine: LoadTestOptions) -> int:
    channel = take_stdout()
    llm = LLM(named.model, replace(engine.config, shared_lookup=False))  # prompts are repeated
    worker = Worker(llm)
    about = {"version": headstart.__version__, "load_s": llm.load_s, **llm.info}
    handlers = {each.__name__: each for each in (worker.encode, worker.decode, worker.prefill, worker.batch)}
    serve(channel, about, handlers)
    return 0


if __name__ == "__main__":
    sys.exit(run.run(**run.read(run.split(sys.argv[1:])[0])))
