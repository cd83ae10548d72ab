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
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from acceptance import first_turns

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import DraftStats, Request, SamplingParams, Sequence, Span
from headstart.drafters.base import Wish

VLLM = """
import json, sys, vllm
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
job, rounds = json.load(sys.stdin), []
propose = SpecDecodeBaseProposer.propose
def recorded(self, **inputs):
    places, rows = inputs["target_positions"], inputs["token_indices_to_sample"]
    places = places[0] if places.dim() == 2 else places
    known = int(places[-1 if rows is None else int(rows[0])]) + 2
    drafts = propose(self, **inputs)
    rounds[-1].append([known, *drafts[0].tolist()])
    return drafts
SpecDecodeBaseProposer.propose = recorded
def write(ids):
    rounds.append([])
    return llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs[0]
llm = vllm.LLM(job["model"], dtype=job["dtype"], max_model_len=job["max_model_len"],
               enable_prefix_caching=False, seed=0, trust_remote_code=True, disable_log_stats=False,
               enforce_eager=job["listen"], speculative_config=job["speculative"])
params = vllm.SamplingParams(temperature=0, max_tokens=job["max_tokens"])
outputs = [write(ids) for ids in job["prompts"]]
counts = {}
for metric in llm.get_metrics():
    if metric.name.startswith("vllm:spec_decode"):
        counts[metric.name] = getattr(metric, "values", None) or getattr(metric, "value", None)
result = {"version": vllm.__version__, "counts": counts, "ids": [list(each.token_ids) for each in outputs],
          "rounds": rounds}
print("RESULT " + json.dumps(result))
"""


def in_vllm(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What vLLM writes and counts. With job["listen"], `rounds` by prompt: [known tokens, draft tokens...] of every
    draft."""
    job = {"dtype": "bfloat16", "max_model_len": 4096, "listen": False, **job}
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if job["listen"]:  # drafts are seen only where the engine is in the process that asks
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    done = subprocess.run(
        [python, "-c", VLLM], input=json.dumps(job), text=True, stdout=subprocess.PIPE, env=environment, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return found
    sys.exit(f"vLLM ended with {done.returncode} and no result")


def in_headstart(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[DraftStats, list[list[int]]]:
    """Counts of drafting and the texts' tokens, greedy, one prompt after another."""
    stats, texts = DraftStats(), []
    for ids in prompts:
        (each,) = llm.generate([ids], SamplingParams(max_tokens=max_tokens))
        stats.add(each.speculation)
        texts.append(each.token_ids)
    return stats, texts


def shares(per_position: list[float]) -> str:
    return "by position " + " ".join(f"{share:.3f}" for share in per_position)


def drafts_behind(llm: LLM, tokens: list[int], length: int, depth: int) -> list[int]:
    """What headstart drafts when the first `length` tokens are known."""
    request = Request(
        request_id="forced", prompt_ids=tuple(tokens[:1]), params=SamplingParams(), seed=0, stop_ids=frozenset()
    )
    engine, sequence = llm.engine, Sequence(request, 0, list(tokens[:length]), 0)
    assert engine.drafting.drafter and engine.memory.reserve(sequence, length + depth + 1)
    engine.runner.forward([Span(sequence, 0, length - 1, 0)])
    sequence.num_computed = length - 1
    engine.drafting.drafter.propose([Wish(sequence, depth)])
    engine.memory.release(sequence)
    return sequence.draft.tokens


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
