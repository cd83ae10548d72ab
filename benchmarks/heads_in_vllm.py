"""Does an exported head accept in vLLM as it does in headstart? Same prompts, greedy, fixed depth.

    python benchmarks/heads_in_vllm.py --questions question.jsonl --export EXPORTED --vllm-python VLLM/bin/python
    python benchmarks/heads_in_vllm.py ... --trunk BF16_DIRECTORY --export EAGLE3_HEAD

EXPORTED is what `headstart export --to vllm-mimo` wrote (trunk and head), or with --trunk an EAGLE-3 head directory.
headstart reads the very same bfloat16 files. The first prompts of each category, chat template, natural end of text.
The two engines' texts part where two tokens are nearly as likely (bfloat16), so headstart also drafts behind the same
tokens of vLLM's texts, round by round: these acceptance lengths are compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engines.headstart.drafts import drafts_behind, in_headstart
from engines.vllm.drafts import in_vllm
from measure.questions import first_turns

from headstart.api import LLM
from headstart.config import EngineConfig


def shares(per_position: list[float]) -> str:
    return "by position " + " ".join(f"{share:.3f}" for share in per_position)


def forced_length(llm: LLM, texts: list[list[int]], rounds: list[list[list[int]]], depth: int) -> tuple[float, float]:
    """(acceptance length of headstart's drafts, of the other engine's) behind the same tokens of the same texts.
    rounds[i] of text i: [known tokens, draft tokens...]."""
    count, hits = 0, [0, 0]
    for tokens, drafted in zip(texts, rounds, strict=True):
        for known, *theirs in drafted:
            if known + depth > len(tokens):
                continue
            count += 1
            for side, guesses in enumerate((drafts_behind(llm, tokens, known, depth), theirs)):
                right = [guess == token for guess, token in zip(guesses, tokens[known:], strict=False)]
                hits[side] += right.index(False) if False in right else len(right)
    return 1 + hits[0] / count, 1 + hits[1] / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--trunk", type=Path, help="the trunk of an EAGLE-3 head, as bfloat16 safetensors")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--per-category", type=int, default=1)
    args = parser.parse_args()
    model = str(args.trunk or args.export)
    config = EngineConfig(head=str(args.export) if args.trunk else None, depth=args.depth, max_model_len=4096)
    llm = LLM(model, config)
    questions = [prompt for _, prompt in first_turns(args.questions, args.per_category)]
    prompts = [llm.encode(question) for question in questions]
    stats, ours = in_headstart(llm, prompts, args.max_tokens)
    speculative = {"num_speculative_tokens": args.depth, "method": llm.method}
    if args.trunk:
        speculative["model"] = str(args.export)
    job = {
        "model": model, "speculative": speculative, "prompts": prompts, "max_tokens": args.max_tokens, "listen": True,
    }  # fmt: skip
    theirs = in_vllm(args.vllm_python, job)
    counts = theirs["counts"]
    drafts, accepted = counts["vllm:spec_decode_num_drafts"], counts["vllm:spec_decode_num_accepted_tokens"]
    length = 1 + accepted / drafts
    same = sum(a == b for a, b in zip(ours, theirs["ids"], strict=True))
    print(f"{llm.method}, depth {args.depth}, {len(prompts)} prompts, up to {args.max_tokens} tokens, greedy")
    per_position = [hits / stats.drafts for hits in stats.per_position]
    print(f"headstart             acceptance length {stats.acceptance_length:.3f} {shares(per_position)}")
    per_position = [hits / drafts for hits in counts["vllm:spec_decode_num_accepted_tokens_per_pos"]]
    print(f"vLLM {theirs['version']:<16} acceptance length {length:.3f} {shares(per_position)}")
    print(f"difference            {abs(length - stats.acceptance_length):.3f}; texts equal {same}/{len(prompts)}")
    texts = [prompt + ids for prompt, ids in zip(prompts, theirs["ids"], strict=True)]
    ours_there, again = forced_length(llm, texts, theirs["rounds"], args.depth)
    print(f"on vLLM's own texts   acceptance length {ours_there:.3f} of headstart's drafts, {again:.3f} of vLLM's")
    return 0 if abs(ours_there - again) <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
