"""What lookups in earlier answers give where requests repeat themselves: the same workload with and without them.

    python benchmarks/repeats.py [--tokens 96]

again  The same questions a second time, greedy.
warm   The same at T = 0.8, with another seed: texts go other ways.
tools  Tool calls under one JSON schema about different things, greedy.
edits  A file written out again with one name in it changed, by different names, greedy: the file is in each prompt.
fresh  Questions that nothing was asked of before: nothing may be lost.

One request at a time, depth auto. All ways run in turn, request by request, each on an engine of its own; texts are
compared. `own first` takes a match in the text itself wherever there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.load import load_model
from headstart.stats import DraftStats
from headstart.text.grammar_spec import GrammarSpec
from headstart.tools.prompts import builtin_prompts

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"const": "search_documents"},
        "arguments": {
            "type": "object",
            "properties": {"query": {"type": "string", "maxLength": 60}, "limit": {"type": "integer", "maximum": 50}},
            "required": ["query", "limit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
THINGS = ("cats", "the moon", "bread", "Oslo", "old maps", "rivers", "chess", "tea")
FILE = """def total(items):
    result = 0
    for item in items:
        if item.price > 0:
            result += item.price * item.count
    return result
"""


@dataclass(frozen=True)
class Asked:
    prompt: str
    params: SamplingParams
    schema: GrammarSpec | None = None


@dataclass
class Way:
    """One way of drafting: its engine, and what came of each workload."""

    llm: LLM
    seconds: dict[str, list[float]] = field(default_factory=dict)
    stats: dict[str, DraftStats] = field(default_factory=dict)

    def run(self, name: str, asked: Asked) -> list[int]:
        (done,) = self.llm.generate([asked.prompt], asked.params, constraint=asked.schema)
        self.seconds.setdefault(name, []).append(done.timing["decode_s"])
        self.stats.setdefault(name, DraftStats()).add(done.speculation)
        return done.token_ids


def workloads(tokens: int) -> Iterator[tuple[str, list[Asked]]]:
    """By name; those that begin with an underscore only prepare the next one."""
    prompts = [prompt for _, prompt in builtin_prompts()]
    first, rest = prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]
    greedy = SamplingParams(max_tokens=tokens)
    yield "fresh", [Asked(prompt, greedy) for prompt in first]
    yield "again", [Asked(prompt, greedy) for prompt in first]
    for name, seed in (("_warm", 1), ("warm", 2)):
        yield name, [Asked(prompt, SamplingParams(max_tokens=tokens, temperature=0.8, seed=seed)) for prompt in rest]
    spec = GrammarSpec("json_schema", SCHEMA)
    calls = [Asked(f"Call the tool search_documents to find documents about {each}.", greedy, spec) for each in THINGS]
    yield "tools", calls
    names = ("total", "price_sum", "sum_up", "whole_price", "add_all")
    text = "Rename the function to {} and write the whole file again:\n\n" + FILE
    yield "edits", [Asked(text.format(each), greedy) for each in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    model = load_model(None, EngineConfig())
    config = {"max_num_seqs": 1, "max_model_len": 1024, "kv_blocks": 128}
    ways = {
        name: Way(LLM(model, EngineConfig(shared_lookup=shared, **config)))
        for name, shared in (("without", False), ("with", True))
    }
    for name, requests in workloads(args.tokens):
        for number, asked in enumerate(requests):
            order = list(ways.values())
            texts = [way.run(name, asked) for way in (order if number % 2 else order[::-1])]
            assert all(text == texts[0] for text in texts), f"{name}: another text"
        if name.startswith("_"):
            continue
        row = {"workload": name, "requests": len(requests)}
        for way_name, way in ways.items():
            stats = way.stats[name]
            row[way_name] = {
                "decode_s": sum(way.seconds[name]),
                "tokens_per_pass": stats.emitted / stats.passes,
                "acceptance_length": stats.acceptance_length,
                "sources": dict(stats.sources),
            }
        pairs = zip(ways["without"].seconds[name], ways["with"].seconds[name], strict=True)
        row["speedup"] = median(one / other for one, other in pairs if other > 0)
        print(json.dumps(row), flush=True)
    print("all texts are the same", file=sys.stderr)


if __name__ == "__main__":
    main()
