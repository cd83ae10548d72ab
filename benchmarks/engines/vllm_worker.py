"""vLLM as a worker process in its own interpreter: loads once, then measures on request.

    PYTHONPATH=benchmarks VLLM_PYTHON benchmarks/engines/vllm_worker.py MODEL_DIRECTORY

Times are vLLM's own (RequestOutput.metrics): a request's first token, its last token, when it was scheduled. They are
taken in the engine core, without detokenization in the front end.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from engines.worker_protocol import serve, take_stdout


class Worker:
    """Handlers of requests to one LLM."""

    def __init__(self, model: str) -> None:
        import vllm

        started = time.perf_counter()
        self.sampling = vllm.SamplingParams
        self.llm = vllm.LLM(
            model, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False, disable_log_stats=False, seed=0
        )
        self.about = {"version": vllm.__version__, "load_s": time.perf_counter() - started}

    def _run(self, prompts: list[list[int]], **sampling: Any) -> list[Any]:
        return self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], self.sampling(temperature=0, **sampling), use_tqdm=False
        )

    def decode(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Greedy decoding of one prompt to its natural end."""
        output = self._run([prompt], max_tokens=max_tokens)[0]
        choice, metrics = output.outputs[0], output.metrics
        return {
            "num_tokens": len(choice.token_ids),
            "decode_s": metrics.last_token_ts - metrics.first_token_ts,
            "token_ids": list(choice.token_ids),
            "text": choice.text,
        }

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Time of a prompt to its first token."""
        metrics = self._run([prompt], max_tokens=1)[0].metrics
        return {"num_tokens": len(prompt), "seconds": metrics.first_token_ts - metrics.scheduled_ts}

    def batch(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """All prompts at once with exactly `max_tokens` each, timed from the call to the last token."""
        started = time.perf_counter()
        outputs = self._run(prompts, max_tokens=max_tokens, ignore_eos=True)
        seconds = time.perf_counter() - started
        return {"num_tokens": sum(len(each.outputs[0].token_ids) for each in outputs), "seconds": seconds}


def main() -> None:
    channel = take_stdout()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GB
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    worker = Worker(sys.argv[1])
    handlers = {"decode": worker.decode, "prefill": worker.prefill, "batch": worker.batch}
    serve(channel, worker.about, handlers)


if __name__ == "__main__":  # vLLM's engine process imports this file
    main()
