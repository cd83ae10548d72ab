"""Does an EAGLE-3 head accept in llama.cpp as it does in headstart? Same prompts, greedy, fixed depth.

    python benchmarks/heads_in_llama.py --questions question.jsonl --llama-source LLAMA --trunk BF16_DIRECTORY \\
        --head EAGLE3_HEAD --work WORK

LLAMA holds llama.cpp's source and `build/bin`. Trunk and head are converted by its own script (bfloat16), in WORK;
headstart reads the same directories. The first prompts of each category, chat template, natural end of text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engines.headstart.drafts import in_headstart
from engines.llamacpp.server import LlamaServer
from engines.llamacpp.weights import converted
from measure.questions import first_turns

from headstart.api import LLM
from headstart.config import EngineConfig


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--llama-source", type=Path, required=True)
    parser.add_argument("--trunk", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--python", help="with torch and what llama.cpp's converter needs; default: this one")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--per-category", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    trunk, head = converted(args, args.trunk), converted(args, args.head, ("--target-model-dir", str(args.trunk)))
    config = EngineConfig(head=str(args.head), depth=args.depth, max_model_len=4096, threads=args.threads)
    llm = LLM(str(args.trunk), config)
    prompts = [llm.encode(question) for _, question in first_turns(args.questions, args.per_category)]
    stats, ours = in_headstart(llm, prompts, args.max_tokens)
    depth = str(args.depth)
    more = [
        "-md", str(head), "--spec-type", "draft-eagle3", "--spec-draft-n-max", depth, "--spec-draft-n-min", depth,
        "--spec-draft-p-min", "0",
    ]  # fmt: skip
    server = LlamaServer(args.llama_source / "build/bin", trunk, args.threads, args.work / "llama-eagle3.log", more)
    tokens = accepted = same = 0
    try:
        server.wait()
        for ids, own in zip(prompts, ours, strict=True):
            answer = server.complete(ids, args.max_tokens)
            timings = answer["timings"]
            tokens += timings["predicted_n"]
            accepted += timings.get("draft_n_accepted", 0)
            same += answer["tokens"] == own
    finally:
        server.group.end()
    length = tokens / (tokens - accepted)  # every pass gives one token beside the accepted ones
    own_length = stats.emitted / stats.passes
    print(f"eagle3, depth {args.depth}, {len(prompts)} prompts, up to {args.max_tokens} tokens, greedy")
    print(f"headstart  tokens per pass {own_length:.3f} (acceptance length {stats.acceptance_length:.3f})")
    print(f"llama.cpp  tokens per pass {length:.3f}; texts equal {same}/{len(prompts)}")
    return 0 if abs(length - own_length) <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
