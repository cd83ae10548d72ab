"""Decode speed with and without drafting, one sequence at a time, in alternating order (docs/benchmarks.md).

    python benchmarks/speed.py --questions question.jsonl --per-category 2 --rounds 3

One process, one loaded model; per prompt the two ways alternate A B, B A, ...; the speed of a prompt is tokens after
the first / seconds after the first, the ratio is taken within each pair. Medians with the range of the middle half.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median, quantiles

from acceptance import first_turns

from headstart.api import LLM
from headstart.cli.render import progress
from headstart.config import EngineConfig
from headstart.core import DraftStats, SamplingParams
from headstart.tools.pairs import decode_pair


def spread(values: list[float]) -> str:
    """Median, lower and upper quartile."""
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.2f} ({low:.2f} to {high:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--head")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    config = EngineConfig(head=args.head, depth=args.depth, threads=args.threads, max_model_len=4096)
    llm = LLM(args.model, config)
    prompts = [prompt for _, prompt in first_turns(args.questions, args.per_category)]
    llm.generate(prompts[:1], SamplingParams(max_tokens=8))
    speeds: dict[bool, list[float]] = {False: [], True: []}
    ratios, same, stats = [], 0, DraftStats()
    with progress("timing") as advance:
        for number in range(args.rounds):
            for index, prompt in enumerate(prompts):
                params = SamplingParams(temperature=args.temperature, seed=index, max_tokens=args.max_tokens)
                runs = decode_pair(llm, prompt, params, number + index)
                advance(number * len(prompts) + index + 1, args.rounds * len(prompts), f"round {number + 1}")
                same += runs[True].token_ids == runs[False].token_ids
                stats.add(runs[True].speculation)
                rates = {on: run.timing["decode_tokens_per_s"] for on, run in runs.items()}
                if all(rates.values()):
                    ratios.append(rates[True] / rates[False])
                    for on, rate in rates.items():
                        speeds[on].append(rate)
    print(f"{llm.info}, T = {args.temperature:g}")
    print(f"{len(prompts)} prompts x {args.rounds} pairs, {args.max_tokens} tokens")
    print(f"same text      {same}/{len(prompts) * args.rounds}")
    print(f"plain          {spread(speeds[False])} tokens/s")
    print(f"drafting       {spread(speeds[True])} tokens/s")
    print(f"ratio          {spread(ratios)}")
    print(f"passes/token   {stats.passes / stats.emitted:.2f}, acceptance length {stats.acceptance_length:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
