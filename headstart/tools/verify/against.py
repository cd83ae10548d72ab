"""`verify --against transformers`: greedy token ids compared with an independent implementation.

transformers is no dependency of headstart: this runs where it is installed. It reads the same weights: a Hugging Face
directory as it is, a GGUF file through its own GGUF reader.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headstart.api import LLM
from headstart.core import Progress, Report, SamplingParams
from headstart.errors import UsageError
from headstart.tools.prompts import builtin_prompts
from headstart.tools.verify.margin import Judge
from headstart.tools.verify.options import VerifyOptions


@dataclass(frozen=True)
class Compared:
    """One prompt: the first output position where the two differ (None: nowhere) and how far apart the tokens are."""

    prompt: int
    num_tokens: int
    position: int | None = None
    ours: int = -1
    theirs: int = -1
    margin: float = 0.0
    tie: bool = True


def run_against(options: VerifyOptions, progress: Progress) -> Report:
    """Greedy text of every prompt from both. Raises UsageError where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("--against transformers: transformers is not installed", "pip install transformers")
    llm = LLM(options.model, replace(options.config, depth=3))
    prompts = list(options.prompts or [prompt for _, prompt in builtin_prompts()])
    params = SamplingParams(max_tokens=options.max_tokens)
    ours = llm.generate(prompts, params, raw=options.raw)
    oracle = _Oracle(llm)
    judge = Judge(options.model, options.config)
    compared = []
    for index, completion in enumerate(ours):
        theirs = oracle.greedy(completion.prompt_token_ids, options.max_tokens)
        compared.append(_compare(index, completion.prompt_token_ids, completion.token_ids, theirs, judge, params))
        progress(index + 1, len(ours), "transformers")
    return _report(llm, compared)


class _Oracle:
    """The same checkpoint in transformers, float32."""

    def __init__(self, llm: LLM) -> None:
        from transformers import AutoModelForCausalLM

        path = llm.model.checkpoint.path
        folder, gguf = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, **gguf, dtype="float32")
        self._eos = sorted(llm.tokenizer.eos_ids)

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        ids = self._model.dummy_inputs["input_ids"].new_tensor([list(prompt)])
        output = self._model.generate(
            ids,
            attention_mask=ids * 0 + 1,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self._eos,
            pad_token_id=self._eos[0],
        )
        return [int(token) for token in output[0, len(prompt) :]]


def _compare(
    index: int, prompt: list[int], ours: list[int], theirs: list[int], judge: Judge, params: SamplingParams
) -> Compared:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return Compared(index, len(ours), None if len(ours) == len(theirs) else min(len(ours), len(theirs)), tie=False)
    margin, tie = judge.margin([*prompt, *ours[:at]], ours[at], theirs[at], params)
    return Compared(index, len(ours), at, ours[at], theirs[at], margin, tie)


def _report(llm: LLM, compared: list[Compared]) -> Report:
    same = [each for each in compared if each.position is None]
    wrong = [each for each in compared if each.position is not None and not each.tie]
    tokens = sum(each.num_tokens for each in compared)
    data = {
        "ok": not wrong,
        "model": llm.model.name,
        "against": "transformers",
        "texts": len(compared),
        "identical": len(same),
        "tokens": tokens,
        "ties": len(compared) - len(same) - len(wrong),
        "differences": len(wrong),
        "found": [vars(each) for each in compared if each.position is not None],
    }
    lines = [
        f"  {'tie' if each.tie else 'DIFFERENT'}: prompt {each.prompt}, output token {each.position}: "
        f"{each.ours} and {each.theirs}, margin {each.margin:.2g}"
        for each in compared
        if each.position is not None
    ]
    lines.append(
        f"greedy text identical to transformers for {len(same)}/{len(compared)} prompts ({tokens} tokens); "
        f"ties {data['ties']}, differences {len(wrong)}"
    )
    return Report(ok=not wrong, data=data, lines=lines)
