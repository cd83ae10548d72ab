"""mistral.rs as a worker process in its own interpreter: loads a GGUF file once, then measures on request.

    PYTHONPATH=benchmarks MISTRAL_PYTHON benchmarks/engines/mistral_worker.py MODEL.gguf

Times are its own (`Usage`): seconds of the prompt, then seconds to the last token. It takes text instead of token ids:
ids are decoded to text with special tokens, which it encodes again.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engines.worker_protocol import serve, take_stdout

MAX_SEQS = 64


class Worker:
    """Handlers over one Runner."""

    def __init__(self, model: Path) -> None:
        import mistralrs

        started = time.perf_counter()
        self.request = mistralrs.CompletionRequest
        which = mistralrs.Which.GGUF(quantized_model_id=str(model.parent), quantized_filename=model.name)
        self.runner = mistralrs.Runner(which, max_seqs=MAX_SEQS, prefix_cache_n=0, token_source="none")
        self.about = {"version": version("mistralrs"), "load_s": time.perf_counter() - started}

    def _run(self, prompt: list[int], max_tokens: int, ignore_eos: bool = False) -> Any:
        text = self.runner.detokenize_text(prompt, False)
        request = self.request(text, "default", max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
        return self.runner.send_completion_request(request)

    def decode(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """One prompt to its natural end, greedy."""
        answer = self._run(prompt, max_tokens)
        usage = answer.usage
        return {
            "num_tokens": usage.completion_tokens,
            "decode_s": usage.total_completion_time_sec,
            "token_ids": [],
            "text": answer.choices[0].text,
        }

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """A prompt to its first token."""
        usage = self._run(prompt, 1).usage
        return {"num_tokens": usage.prompt_tokens, "seconds": usage.total_prompt_time_sec}

    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """All prompts at once, exactly `max_tokens` each; from the call to the last token."""
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda each: self._run(each, max_tokens, True), prompts))
        seconds = time.perf_counter() - started
        return {"num_tokens": sum(each.usage.completion_tokens for each in answers), "seconds": seconds}


def main() -> None:
    channel = take_stdout()
    worker = Worker(Path(sys.argv[1]))
    serve(channel, worker.about, {"decode": worker.decode, "prefill": worker.prefill, "batch": worker.batch})


if __name__ == "__main__":
    main()
