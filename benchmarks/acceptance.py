"""Acceptance length of a drafter per category and position, as docs/benchmarks.md reports it.

    python benchmarks/acceptance.py --questions question.jsonl --temperature 0
    python benchmarks/acceptance.py --questions question.jsonl --head ./my-head --per-category 10 --max-tokens 128

Prompts are the first turns of Spec-Bench (`question_id`, `category`, `turns`) in the chat template. Texts run to their
natural end, with a fixed depth. Acceptance length = 1 + accepted / drafts. The last row is the macro mean over
categories.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from measure.questions import first_turns

from headstart.api import LLM
from headstart.cli.render import progress
from headstart.config import EngineConfig
from headstart.core import DraftStats, SamplingParams


def measure(llm: LLM, prompts: list[tuple[str, str]], temperature: float, max_tokens: int) -> dict[str, DraftStats]:
    """Draft statistics per category."""
    params = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed) for seed in range(len(prompts))]
    done = 0
    with progress("decoding") as advance:

        def finished(index: int, completion: object) -> None:
            nonlocal done
            done += 1
            advance(done, len(prompts), prompts[index][0])

        completions = llm.generate([prompt for _, prompt in prompts], params, on_finish=finished)
    stats: dict[str, DraftStats] = defaultdict(DraftStats)
    for (category, _), completion in zip(prompts, completions, strict=True):
        stats[category].add(completion.speculation)
    return dict(stats)


def rows(stats: dict[str, DraftStats], depth: int) -> list[list[str]]:
    """One row per category, then the macro mean: acceptance length, passes per token, cumulative acceptance."""
    table, values = [], []
    for category, each in stats.items():
        hits = [*each.per_position, *[0] * depth][:depth]
        numbers = [each.acceptance_length, each.passes / max(each.emitted, 1), *(h / max(each.drafts, 1) for h in hits)]
        values.append(numbers)
        table.append([category, *(f"{number:.2f}" for number in numbers)])
    means = [sum(column) / len(values) for column in zip(*values, strict=True)]
    return [*table, ["**macro mean**", *(f"{number:.2f}" for number in means)]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--head")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rule", default="exact")
    args = parser.parse_args()
    config = EngineConfig(
        head=args.head, drafter=args.drafter, depth=args.depth, max_num_seqs=args.batch, threads=args.threads,
        max_model_len=4096, rule=args.rule, shared_lookup=False,
    )  # fmt: skip
    prompts = first_turns(args.questions, args.per_category)
    llm = LLM(args.model, config)
    stats = measure(llm, prompts, args.temperature, args.max_tokens)
    header = ["category", "acceptance length", "passes per token", *(f"position {i + 1}" for i in range(args.depth))]
    print(f"{llm.info}, T = {args.temperature:g}, {len(prompts)} prompts, up to {args.max_tokens} tokens")
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows(stats, args.depth):
        print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
