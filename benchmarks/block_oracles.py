"""Do block drafters draft here what their publishers' own code drafts, behind the same tokens?

    python benchmarks/block_oracles.py --work WORK [--zlab DFLASH/model.py] [--deepspec DEEPSPEC] [--speculators] \\
        [--vllm PYTHON]

A small random trunk and small DFlash and DSpark drafters, trained on its own texts for a minute, are made in WORK, and
written by `headstart export` for each target. Each oracle writes texts greedily and tells every draft it made:
transformers (`speculation_type="dflash"`), z-lab's model.py and DeepSpec's package where their paths are given
(github.com/z-lab/dflash, deepseek-ai/DeepSpec), the package speculators where it is installed, vLLM on the CPU in an
interpreter of its own. headstart reads each drafter in the layout that the oracle reads. All in float32, of weights in
bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from engines import published
from engines.headstart.drafts import drafts_behind
from engines.published import Texts, Told
from engines.vllm.drafts import in_vllm
from measure.pairs import make_pair

from headstart.api import LLM
from headstart.config import EngineConfig

BLOCK, TOKENS = 5, 32
AS_IT_IS = "vllm-dflash, vLLM as it is"
"""Known to differ (see `in_vllm`), shown and not counted."""
EQUAL, LENGTHS = 0.99, 0.05
"""At least so many draft tokens are equal, and acceptance lengths differ by no more."""


def compare(name: str, pair: tuple[Path, Path], theirs: Told, texts: Texts) -> bool:
    """Every draft of an oracle against headstart's behind the same tokens; both judged by the oracle's texts."""
    trunk, head = pair
    config = EngineConfig(backend="reference", dtype="float32", threads=1, max_model_len=128, head=str(head), depth=1)
    llm = LLM(str(trunk), config)
    ours = {before: drafts_behind(llm, list(before), len(before), len(draft)) for before, draft in theirs.items()}
    pairs = [both for before, draft in theirs.items() for both in zip(ours[before], draft, strict=True)]
    same, lengths = sum(a == b for a, b in pairs) / len(pairs), [length_of(told, texts) for told in (ours, theirs)]
    good = same >= EQUAL and abs(lengths[0] - lengths[1]) <= LENGTHS
    print(
        f"{name:36}{len(theirs):5} drafts, {len(pairs):5} tokens, {same:.2%} equal; acceptance length "
        f"{lengths[0]:.3f} here, {lengths[1]:.3f} there{'' if good else ': DIFFERS'}"
    )
    return good


def length_of(told: Told, texts: Texts) -> float:
    """1 + accepted tokens of a draft."""
    accepted = 0
    for before, draft in told.items():
        text = next(text for text in texts if tuple(text[: len(before)]) == before)
        judged = list(zip(draft, text[len(before) :], strict=False))
        accepted += next((i for i, (a, b) in enumerate(judged) if a != b), len(judged))
    return 1 + accepted / len(told)


def by_vllm(
    python: Path, trunk: Path, head: Path, prompts: Texts, tokens: int, *, mended: bool = True
) -> tuple[Told, Texts]:
    job = {
        "model": str(trunk), "prompts": prompts, "max_tokens": tokens, "listen": True, "dtype": "float32",
        "max_model_len": 128, "mended": mended,
        "speculative": {"method": "dflash", "model": str(head), "num_speculative_tokens": BLOCK - 1},
    }  # fmt: skip
    found = in_vllm(python, job)
    texts = [[*prompt, *written] for prompt, written in zip(prompts, found["ids"], strict=True)]
    rounds = zip(texts, found["rounds"], strict=True)
    return {tuple(text[:known]): draft for text, every in rounds for known, *draft in every if known < len(text)}, texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--zlab", type=Path, help="model.py of z-lab/dflash")
    parser.add_argument("--deepspec", type=Path, help="a checkout of deepseek-ai/DeepSpec")
    parser.add_argument("--speculators", action="store_true", help="its package is installed")
    parser.add_argument("--vllm", type=Path, help="an interpreter with vLLM for the CPU")
    parser.add_argument("--steps", type=int, default=150, help="of training each drafter; 0: random ones")
    args = parser.parse_args()
    pair = make_pair(args.work, block=BLOCK, steps=args.steps)
    zlab, spark = pair.dflash["vllm-dflash"], pair.dspark["vllm-dspark"]
    flash_speculators, spark_speculators = (each["speculators"] for each in (pair.dflash, pair.dspark))
    runs: list[tuple[str, Path, Any]] = [("DFlash, transformers", pair.muse, published.in_transformers)]
    if args.zlab:
        runs.append(("vllm-dflash, z-lab", zlab, partial(published.in_zlab, args.zlab)))
    if args.deepspec:
        runs.append(("vllm-dspark, DeepSpec", spark, partial(published.in_deepspec, args.deepspec)))
    if args.speculators:
        runs.append(("speculators, DFlash, speculators", flash_speculators, published.in_speculators))
        runs.append(("speculators, DSpark, speculators", spark_speculators, published.in_speculators))
    if args.vllm:
        runs.append(("vllm-dflash, vLLM", zlab, partial(by_vllm, args.vllm)))
        runs.append((AS_IT_IS, zlab, partial(by_vllm, args.vllm, mended=False)))
        runs.append(("speculators, DFlash, vLLM", flash_speculators, partial(by_vllm, args.vllm)))
    good = True
    for name, head, oracle in runs:
        same = compare(name, (pair.trunk, head), *oracle(pair.trunk, head, pair.prompts, TOKENS))
        good &= same or name == AS_IT_IS
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
