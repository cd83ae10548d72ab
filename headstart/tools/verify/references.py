"""References of `headstart verify`: a float64 engine that decides whether differences are ties, and transformers, an
optional dependency that reads the same weights (GGUF files with its own reader)."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import GREEDY_BELOW, Progress, Report, SamplingParams
from headstart.errors import ModelError, UsageError
from headstart.kernels import philox
from headstart.kernels.backend import ORACLE
from headstart.tools.prompts import first_different_tokens
from headstart.tools.verify.options import VerifyOptions, plain_config

TIE = 1e-3  # scores closer than this are a tie, whose order may depend on float32 rounding


class TieChecker:
    """Recomputes single rows with a float64 reference engine, which is loaded at the first difference. `tie`: largest
    difference of scores that rounding can explain; 0: none."""

    def __init__(self, model: str | None, config: EngineConfig, tie: float = TIE) -> None:
        self._model, self._tie = model, tie
        self._config = replace(plain_config(config), backend=ORACLE, dtype="float64", kv_blocks=None)
        self._llm: LLM | None = None

    def margin(
        self, context: Sequence[int], a: int, b: int, params: SamplingParams, lora: str = ""
    ) -> tuple[float, bool]:
        """Returns |score(a) - score(b)| of tokens a and b after `context`, and whether that is a tie. score = logit / T
        + Gumbel noise by the seed of `params`, or the logit for greedy decoding. lora: name of the adapter."""
        self._llm = self._llm or LLM(self._model, self._config)
        # the raw log-softmax differs from the logits by a constant of the row only
        scores = [_forced_logprob(self._llm, context, token, lora) for token in (a, b)]
        if params.temperature >= GREEDY_BELOW:
            noise = philox.numpy_gumbel(np.array([a, b]), params.seed or 0, len(context), 0, philox.TOKEN)
            scores = [value / params.temperature + g for value, g in zip(scores, noise.tolist(), strict=True)]
        gap = abs(scores[0] - scores[1])
        return gap, gap < self._tie


def _forced_logprob(llm: LLM, context: Sequence[int], token: int, lora: str) -> float:
    """Returns the raw logprob of `token` after `context`. A logit bias, which raw logprobs ignore, forces the token."""
    params = SamplingParams(max_tokens=1, logprobs=0, logit_bias={token: 100.0}, ignore_eos=True)
    entry = llm.generate([list(context)], params, lora=lora)[0].logprobs[0]
    assert entry.token == token, "a bias of 100 exceeds any difference of logits"
    return entry.logprob


def compare_transformers(options: VerifyOptions, progress: Progress) -> Report:
    """Compares greedy answers with those of transformers. Raises UsageError if transformers is not installed, and for
    LoRA adapters, which are not given to transformers; ModelError for a model that transformers does not load."""
    if options.config.lora:
        raise UsageError("--lora does not go with --against transformers", "leave one of them out")
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("--against transformers: transformers is not installed", "pip install transformers")
    llm = LLM(options.model, replace(options.config, depth=3))
    reference = _TransformersModel(llm)
    prompts = options.texts
    params = SamplingParams(max_tokens=options.max_tokens)
    completions = llm.generate(prompts, params, raw=options.raw)
    referee = TieChecker(options.model, options.config)
    found: list[dict[str, Any]] = []
    for index, completion in enumerate(completions):
        prompt, ours = completion.prompt_token_ids, completion.token_ids
        theirs = reference.greedy(prompt, options.max_tokens)
        if tokens := first_different_tokens(ours, theirs):
            at, one, other = tokens
            margin, tie = (0.0, False) if one < 0 else referee.margin([*prompt, *ours[:at]], one, other, params)
            found.append({"prompt": index, "num_tokens": len(ours), "position": at, "ours": one, "theirs": other,
                          "margin": margin, "tie": tie})  # fmt: skip
        progress(index + 1, len(completions), "transformers")
    return _report(llm, len(completions), sum(len(each.token_ids) for each in completions), found)


class _TransformersModel:
    def __init__(self, llm: LLM) -> None:
        from transformers import AutoModelForCausalLM

        path = llm.model.checkpoint.path
        folder, gguf = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        options: dict[str, Any] = {**gguf, "dtype": "float32", "trust_remote_code": False}  # None: transformers asks
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        except (ImportError, OSError, ValueError) as error:  # a family or code of its own that transformers lacks
            raise ModelError(f"transformers cannot load {path}: {str(error).strip().splitlines()[0]}") from error
        self._eos = sorted(llm.tokenizer.eos_ids)

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        ids = self._model.dummy_inputs["input_ids"].new_tensor([list(prompt)])
        output = self._model.generate(
            ids, attention_mask=ids * 0 + 1, max_new_tokens=max_tokens, do_sample=False,
            eos_token_id=self._eos, pad_token_id=self._eos[0],
        )  # fmt: skip
        return [int(token) for token in output[0, len(prompt) :]]


def _report(llm: LLM, texts: int, tokens: int, found: list[dict[str, Any]]) -> Report:
    wrong = sum(not each["tie"] for each in found)
    data = {
        "ok": not wrong, "model": llm.model.name, "against": "transformers", "texts": texts,
        "identical": texts - len(found), "tokens": tokens, "ties": len(found) - wrong, "differences": wrong,
        "found": found,
    }  # fmt: skip
    lines = [
        f"  {'tie' if each['tie'] else 'DIFFERENT'}: prompt {each['prompt']}, output token {each['position']}: "
        f"{each['ours']} and {each['theirs']}, margin {each['margin']:.2g}"
        for each in found
    ]
    identical = f"greedy text identical to transformers for {data['identical']}/{texts} prompts ({tokens} tokens)"
    return Report(ok=not wrong, data=data, lines=[*lines, f"{identical}; ties {data['ties']}, differences {wrong}"])
