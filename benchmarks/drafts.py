"""Speed-up of each drafter over plain decoding: one request at a time, decoding only, prompt by prompt.

    python benchmarks/drafts.py --questions question.jsonl --json drafts.json
    python benchmarks/drafts.py --questions question.jsonl --temperature 0.8 --rows mtp:3 eagle3:2 block=HEAD:5
    python benchmarks/drafts.py --questions question.jsonl --behind 7000 --rows mtp:1 mtp:2 mtp:auto
    python benchmarks/drafts.py --text manual.txt --behind 65536 --model DIR --rows mtp:1 mtp:auto

A row is DRAFTER:DEPTH. DRAFTER is a kind of the model's heads, `ngram`, or `auto` (the default: lookup and the head);
DRAFTER=DIR names another head. Prompts: the first `--per-category` Spec-Bench questions of each category and
headstart's built-in ones, in the chat template, up to `--max-tokens`. With `--behind N`, questions of a category are
joined to prompts of N tokens; categories with fewer tokens are left out. A prompt goes through all rows before the next
one, in alternating order. The clock runs from the first token to the last. Texts must equal those of plain decoding.

Numbers are medians over prompts. Speed-up: ratio to plain tokens/s of the same prompt, with quartiles. `draft`, `pass`,
`host`: milliseconds of a step in the drafter, in the trunk's pass, and in the rest (sampling and Python). `prompt`:
seconds to the first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from measure.machine import load_now, machine_alone, others, provenance, verdict
from measure.questions import by_category, first_turns

from headstart.api import LLM
from headstart.cli.render import progress
from headstart.config import AUTO, Depth, EngineConfig
from headstart.core import SamplingParams
from headstart.tools.prompts import builtin_prompts

PLAIN = "plain"
ROWS = ("mtp:2", "mtp:3", "eagle3:2", "eagle3:3", "ngram:auto", "auto:auto")


@dataclass(frozen=True)
class Record:
    """One prompt with one row. `seconds`: from the first token to the last; `parts`: the share of passes, drafts and
    the rest in them; `prompt_s`: seconds to the first token."""

    row: str
    category: str
    tokens: tuple[int, ...]
    seconds: float
    passes: int
    parts: dict[str, float]
    prompt_s: float

    @property
    def rate(self) -> float:
        return (len(self.tokens) - 1) / self.seconds

    @property
    def length(self) -> float:
        """Tokens per pass."""
        return (len(self.tokens) - 1) / self.passes

    def ms(self, part: str) -> float:
        """Milliseconds of a part per step."""
        return 1000 * self.parts[part] / self.passes


def long_prompts(llm: LLM, questions: Path, per_category: int, behind: int) -> list[tuple[str, str]]:
    """(category, prompt): joined questions, each used once."""
    found = []
    for category, texts in by_category(questions, sys.maxsize).items():
        prompt = ""
        for number in range(per_category):
            while texts and len(llm.encode(prompt)) < behind:
                prompt += texts.pop(0) + "\n\n"
            if len(llm.encode(prompt)) >= behind:
                found.append((f"{category} {number + 1}", prompt))
            prompt = ""
    return found


def text_prompts(llm: LLM, path: Path, count: int, behind: int) -> list[tuple[str, list[int]]]:
    """(category, token ids) of parts of a text."""
    ids = llm.encode(path.read_text("utf-8"))
    return [(f"{path.name} {i + 1}", ids[i * behind : (i + 1) * behind]) for i in range(min(count, len(ids) // behind))]


def make(name: str | None, row: str, config: EngineConfig) -> LLM:
    """The engine of a row."""
    drafter, _, word = row.rpartition(":")
    if row == PLAIN:
        return LLM(name, replace(config, drafter="none", depth=0))
    drafter, _, folder = drafter.partition("=")
    depth: Depth = AUTO if word == AUTO else int(word)
    return LLM(name, replace(config, drafter=drafter, head=folder or None, depth=depth))


def decode(llm: LLM, row: str, category: str, prompt: str | list[int], params: SamplingParams) -> Record | None:
    """Decodes a prompt; None for a text of one token."""
    completion = None
    for number, delta in enumerate(llm.stream(prompt, params)):
        if number == 0:
            llm.engine.reset_stats()
        completion = delta.completion
    assert completion is not None
    if not (passes := llm.engine.stats.passes):
        return None
    times, parts = completion.timing, dict(llm.engine.seconds)
    return Record(row, category, tuple(completion.token_ids), times["decode_s"], passes, parts, times["ttft_s"])


def measure(
    llms: Mapping[str, LLM], prompts: Sequence[tuple[str, str | list[int]]], temperature: float, max_tokens: int
) -> list[Record]:
    """All rows of each prompt in turn. Raises SystemExit if a text differs from plain decoding."""
    records: list[Record] = []
    for row, llm in llms.items():  # warm-up: allocations, and costs for depth auto
        for category, prompt in builtin_prompts()[:2]:
            decode(llm, row, category, prompt, SamplingParams(max_tokens=32))
    with progress("decoding") as advance:
        for number, (category, prompt) in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number)
            rows = list(llms) if number % 2 == 0 else list(llms)[::-1]
            found = [decode(llms[row], row, category, prompt, params) for row in rows]
            kept = [each for each in found if each]
            if wrong := [each.row for each in kept if each.tokens != kept[0].tokens]:
                raise SystemExit(
                    f"prompt {number} ({category}): the text of {', '.join(wrong)} differs from plain decoding"
                )
            records += kept
            advance(number + 1, len(prompts), category)
    return records


def table(records: Sequence[Record], rows: Sequence[str]) -> list[list[str]]:
    """One line per row: tokens per pass, milliseconds of a step by part, tokens/s, speed-up with quartiles."""
    by_row = {row: [each for each in records if each.row == row] for row in rows}
    lines = []
    for row, own in by_row.items():
        ratios = [each.rate / plain.rate for each, plain in zip(own, by_row[PLAIN], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        lengths = statistics.mean(each.length for each in own)
        parts = [statistics.median(each.ms(part) for each in own) for part in ("draft", "verify", "host")]
        rate = statistics.median(each.rate for each in own)
        numbers = [f"{lengths:.2f}", *(f"{part:.2f}" for part in parts), f"{rate:.0f}"]
        numbers.append(f"{statistics.median(each.prompt_s for each in own):.2f}")
        lines.append([row, *numbers, f"**{middle:.2f}x** ({low:.2f} to {high:.2f})"])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--model")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--behind", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = EngineConfig(threads=args.threads, max_num_seqs=1, seed=0, shared_lookup=False)
    if args.behind:
        config = replace(config, enable_prefix_caching=False)
    else:
        config = replace(config, max_model_len=4096, kv_blocks=300)
    rows = [PLAIN, *args.rows]
    llms = {row: make(args.model, row, config) for row in rows}
    if args.text:
        prompts = text_prompts(llms[PLAIN], args.text, args.per_category, args.behind)
    elif args.behind:
        prompts = long_prompts(llms[PLAIN], args.questions, args.per_category, args.behind)
    else:
        prompts = [*first_turns(args.questions, args.per_category), *builtin_prompts()]
    before = load_now()
    records = measure(llms, prompts, args.temperature, args.max_tokens)
    load = load_now().others_since(before)
    if args.json:
        kept = [asdict(each) for each in records]
        document = {"provenance": provenance(args.threads or 0), "load": load, "records": kept}
        args.json.write_text(json.dumps(document) + "\n", "utf-8")
    print(f"T = {args.temperature:g}, {len(prompts)} prompts, {args.max_tokens} tokens. {verdict(others([load]))}")
    header = ["drafter:depth", "tokens a pass", "draft ms", "pass ms", "host ms", "tokens/s", "prompt s", "speed-up"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for line in table(records, rows):
        print("| " + " | ".join(line) + " |")
    return 0


if __name__ == "__main__":
    with machine_alone():
        sys.exit(main())
