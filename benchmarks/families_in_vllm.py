"""Do native MTP heads draft in headstart what they draft in vLLM and transformers? Tiny models, greedy.

    python benchmarks/families_in_vllm.py --models FOLDER --vllm-python VLLM/bin/python [--families glm4_moe mimo]

FOLDER/FAMILY is a model of `headstart train --from-scratch FAMILY`; one that is missing is trained first (--minutes),
or made of random weights with which drafts are accepted now and then (--minutes 0).
vLLM (CPU) writes a text with drafts; every round is then drafted again by headstart behind the same tokens, with
vLLM's conventions (CONVENTIONS), and headstart writes the text itself. In transformers the same, one token deep.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.headstart.drafts import drafts_behind, in_headstart
from engines.vllm.drafts import in_vllm
from families.softened import agreeing

from headstart import registry
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.engine.load import load_model
from headstart.models.base import Family
from headstart.models.small import SCRATCH
from headstart.tools.export.targets.vllm_mimo import CONFIGURATION, MODULE
from headstart.tools.tiny import write_model
from headstart.train.scratch import ScratchOptions, run as train

FAMILIES = (
    "qwen3_5", "qwen3_5_moe", "glm4_moe", "deepseek_v3", "mimo", "glm4_moe_lite", "ernie4_5_moe", "qwen3_next",
    "nemotron_h", "mimo_v2_flash", "step3p5", "longcat_flash",
)  # fmt: skip
CONVENTIONS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"mask_first": True, "recycle": "pre_norm"},
    "deepseek_v3": {"mask_first": True},
    "glm4_moe_lite": {"mask_first": True, "recycle": "pre_norm"},
    "mimo_v2_flash": {"tap": "post_norm", "recycle": "post_norm"},
    "step3p5": {"tap": "post_norm"},
}
"""Where vLLM 0.32 differs from what a family declares: fields of HeadSpec."""
ONLY_BFLOAT16 = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""vLLM's kernels of these run in bfloat16 alone; the others are compared in float32, where ties are rarer."""
IN_TRANSFORMERS = ("deepseek_v3", "glm4_moe")
PROMPTS = (
    "def read(self, size=-1):\n", "class Error(Exception):\n", "import os\nimport sys\n", "    for name in names:\n",
    "The following", "An object is", "If the value", "    if not isinstance(",
)  # fmt: skip
EQUAL, LENGTH_APART = 0.99, 0.05


@dataclass
class Agreement:
    """Draft tokens that headstart drafted too, as far as those before them in the round agreed."""

    same: int = 0
    compared: int = 0

    def add(self, ours: Seq[int], theirs: Seq[int]) -> None:
        for mine, other in zip(ours, theirs, strict=True):
            self.compared += 1
            self.same += mine == other
            if mine != other:
                break

    @property
    def share(self) -> float:
        return self.same / max(self.compared, 1)

    def __str__(self) -> str:
        return f"{self.same}/{self.compared} draft tokens equal ({self.share:.2%})"


def load(path: Path, dtype: str, depth: int, spec: dict[str, Any]) -> LLM:
    """The model with other conventions of its head."""
    config = EngineConfig(backend="reference", dtype=dtype, depth=depth, drafter="mtp", max_model_len=512)
    model = load_model(str(path), config)
    if model.head is None:
        sys.exit(f"{path} has no MTP head")
    head = replace(model.head, spec=replace(model.head.spec, **spec))
    head = replace(model.head, spec=replace(model.head.spec, **spec))
    return LLM(replace(model, head=head), config)


def agreement(llm: LLM, texts: Seq[Seq[int]], rounds: Seq[Seq[Seq[int]]], depth: int) -> Agreement:
    """rounds[i] of text i: [known tokens, draft tokens...]."""
    found = Agreement()
    for tokens, drafted in zip(texts, rounds, strict=True):
        for length, *theirs in drafted:
            if length <= len(tokens):
                found.add(drafts_behind(llm, tokens, length, depth), theirs)
    return found


def vllm_directory(path: Path, folder: Path) -> Path:
    """The model as vLLM takes it: a type that transformers does not know brings its declaration. Of DeepSeek-V3's
    queries vLLM's rotary kernel for CPUs turns the wrong elements; its YaRN code (as in the released models) does not,
    and with factor 1 it is the same function."""
    config = json.loads((path / "config.json").read_text())
    folder = folder / path.name
    folder.mkdir()
    for file in path.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    if config["model_type"] == "mimo":
        config |= {"auto_map": {"AutoConfig": f"{MODULE}.MiMoConfig"}, "attention_bias": True}
        config |= {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
        (folder / f"{MODULE}.py").write_text(CONFIGURATION)
    if config["model_type"] == "deepseek_v3":
        length = config["max_position_embeddings"]
        config |= {"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": length}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_model(family: str, path: Path) -> None:
    declared: Family = registry.find("models", family).FAMILY
    config, arrays = declared.tiny(**{**SCRATCH, **declared.scratch, "vocab_size": 512, "torch_dtype": "float32"})
    write_model(path, config, agreeing(arrays))


def against_vllm(path: Path, python: Path, depth: int, max_tokens: int) -> bool:
    family = path.name
    dtype = "bfloat16" if family in ONLY_BFLOAT16 else "float32"
    llm = load(path, dtype, depth, CONVENTIONS.get(family, {}))
    prompts = [llm.encode(prompt, raw=True) for prompt in PROMPTS]
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "model": str(vllm_directory(path, Path(folder))),
            "dtype": dtype,
            "max_model_len": 512,
            "listen": True,
            "speculative": {"method": "mtp", "num_speculative_tokens": depth},
            "prompts": prompts,
            "max_tokens": max_tokens,
        }
        theirs = in_vllm(python, job)
    texts = [prompt + ids for prompt, ids in zip(prompts, theirs["ids"], strict=True)]
    found = agreement(llm, texts, theirs["rounds"], depth)
    stats, ours = in_headstart(llm, prompts, max_tokens)
    counts = theirs["counts"]
    length = 1 + counts["vllm:spec_decode_num_accepted_tokens"] / counts["vllm:spec_decode_num_drafts"]
    same = sum(a == b for a, b in zip(ours, theirs["ids"], strict=True))
    print(f"{family}, {dtype}, depth {depth}, vLLM {theirs['version']}")
    print(f"    {found}; texts equal {same}/{len(prompts)}")
    print(f"    acceptance length {length:.3f} there, {stats.acceptance_length:.3f} here", flush=True)
    return found.share >= EQUAL and abs(length - stats.acceptance_length) <= LENGTH_APART


def in_transformers(path: Path, prompts: Seq[Seq[int]], max_tokens: int) -> tuple[list[list[int]], list[Any]]:
    """Texts of generate(use_mtp=True), and by text the rounds [known tokens, draft token]."""
    import torch
    import transformers
    from transformers.modeling_layers import MtpModel

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    # the layer number of the released models stands there
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}.*"]
    forward, rounds = MtpModel.forward, []

    def recorded(module: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward(module, *args, **kwargs)
        rounds[-1].append([kwargs["full_input_ids"].shape[1], int(found[1][0, 0].argmax())])
        return found

    MtpModel.forward = recorded
    texts = []
    for prompt in prompts:
        rounds.append([])
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), use_mtp=True, do_sample=False, max_new_tokens=max_tokens,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        texts.append(found[0].tolist())
    MtpModel.forward = forward
    return texts, rounds


def against_transformers(path: Path, max_tokens: int) -> bool:
    llm = load(path, "float32", 1, {})
    prompts = [llm.encode(prompt, raw=True) for prompt in PROMPTS]
    texts, rounds = in_transformers(path, prompts, max_tokens)
    found = agreement(llm, texts, rounds, 1)
    print(f"{path.name}, float32, depth 1, transformers\n    {found}", flush=True)
    return found.share >= EQUAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--vllm-python", type=Path, help="without it, transformers alone is compared with")
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    good = True
    for family in args.families:
        path = args.models / family
        if not path.exists():
            args.models.mkdir(parents=True, exist_ok=True)
            if args.minutes:
                train(ScratchOptions(family=family, out=path, minutes=args.minutes))
            else:
                random_model(family, path)
        if args.vllm_python:
            good &= against_vllm(path, args.vllm_python, args.depth, args.max_tokens)
        if family in IN_TRANSFORMERS:
            good &= against_transformers(path, args.max_tokens)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
