"""What a draft costs: made with one call of the backend against step by step, in turns on the same prompts.

    python benchmarks/draft_loop.py --drafter mtp --temperature 0.8

The texts and drafts of both are compared. `draft` is Drafting.propose; `python` is what of it is neither a pass nor a
draw of the backend. Medians over the steps that drafted, in milliseconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.tools.prompts import builtin_prompts


class Spent:
    """Seconds within some functions, added up."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - begun

        return run


def watch(llm: LLM) -> list[tuple[float, float, int]]:
    """(whole, of the backend, tokens) of every draft from now on."""
    engine, spent, drafts = llm.engine, Spent(), list[tuple[float, float, int]]()
    backend: Any = engine.runner.backend
    for name in ("run", "rows", "sample"):
        setattr(backend, name, spent.timed(getattr(backend, name)))
    prepare = backend.prepare_chain

    def prepared(*arguments: Any, **options: Any) -> Any:
        chain = prepare(*arguments, **options)
        return type("Timed", (), {"draft": staticmethod(spent.timed(chain.draft))})()

    backend.prepare_chain, propose = prepared, engine.drafting.propose

    def timed(sequences: Any) -> None:
        before, begun = spent.seconds, time.perf_counter()
        propose(sequences)
        whole = time.perf_counter() - begun
        if tokens := sum(len(each.draft.tokens) for each in sequences):
            drafts.append((whole, spent.seconds - before, tokens))

    engine.drafting.propose = timed  # type: ignore[method-assign]
    return drafts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--head")
    parser.add_argument("--drafter", default="mtp")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    llm = LLM(args.model, EngineConfig(drafter=args.drafter, head=args.head, depth=args.depth, max_model_len=2048))
    drafts, runner = watch(llm), llm.engine.runner
    whole: Any = runner._chain
    ways = {"step by step": lambda steps: None, "one call": whole}
    found: dict[str, list[Any]] = {way: [] for way in ways}
    texts: dict[str, list[Any]] = {way: [] for way in ways}
    for seed, (_, prompt) in enumerate(builtin_prompts()[: args.prompts + 1]):
        for way, chain in ways.items():
            runner._chain = chain  # type: ignore[method-assign]
            params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=seed)
            drafts.clear()
            (completion,) = llm.generate([prompt], params)
            texts[way].append((completion.token_ids, [tokens for _, _, tokens in drafts]))
            found[way] += drafts[1:] if seed else []  # the first prompt warms up
    print(f"{'':14}{'drafts':>8}{'draft ms':>10}{'quartiles':>16}{'backend':>10}{'python':>10}")
    for way, samples in found.items():
        wholes = [1e3 * total for total, _, _ in samples]
        low, _, high = quantiles(wholes, n=4)
        inner = median(1e3 * backend for _, backend, _ in samples)
        python = median(1e3 * (total - backend) for total, backend, _ in samples)
        print(f"{way:14}{len(samples):8}{median(wholes):10.3f}{f'{low:.3f}-{high:.3f}':>16}{inner:10.3f}{python:10.3f}")
    same = texts["one call"] == texts["step by step"]
    print("texts and drafts are the same" if same else "TEXTS OR DRAFTS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
