"""Transcripts of `headstart verify`: token ids of many texts in a file, for comparison with another machine's."""

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from headstart.api import LLM
from headstart.core import Progress, Report, SamplingParams, no_progress
from headstart.errors import UsageError
from headstart.files import read_regular, write_atomic
from headstart.layers.weights import weights_fingerprint
from headstart.tools.prompts import first_different_tokens
from headstart.tools.verify.options import Prompt, VerifyOptions, prompt_seed
from headstart.version import __version__

MAX_BYTES = 1 << 30


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Text(_Strict):
    """A prompt with its parameters, and the tokens that followed."""

    prompt_ids: list[int]
    temperature: float
    seed: int
    max_tokens: int
    token_ids: list[int]
    adapter: str = ""  # digest of the LoRA adapter; empty: the model as it is


class Transcript(_Strict):
    """The file's content. `arithmetic`: the backend's fingerprint; `options`: rounding of weights and KV cache."""

    headstart: str
    model: str
    weights: str
    options: list[str | None]
    machine: str
    arithmetic: str
    texts: list[Text]


@dataclass(frozen=True)
class Difference:
    """The first difference of a text; -1: one of the texts ends there."""

    text: int
    position: int
    theirs: int
    ours: int


def write(options: VerifyOptions, path: Path, progress: Progress = no_progress) -> Report:
    """Decodes every prompt at every temperature and seed, and writes the transcript. Prompts take the model as it is
    and its adapters in turn."""
    llm = LLM(options.model, options.config)
    prompts = [
        _Prompt(prompt, SamplingParams(temperature=t, seed=prompt_seed(seed, i), max_tokens=options.max_tokens), lora)
        for t, seed in product(options.temperatures, options.seeds)
        for i, (prompt, lora) in enumerate(zip(options.texts, options.loras, strict=True))
    ]
    texts, described = list(_decoded(llm, prompts, options.raw, progress)), _described(llm)
    made = Transcript(**described, texts=texts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (made.model_dump_json(exclude_defaults=True) + "\n").encode())
    except OSError as error:
        raise UsageError(f"--transcript: cannot write {path}: {error.strerror}") from None
    tokens = sum(len(each.token_ids) for each in texts)
    data = {"ok": True, "transcript": str(path), "texts": len(texts), "tokens": tokens, **described}
    return Report(ok=True, data=data, lines=[f"{path}: {len(texts)} texts, {tokens} tokens by {made.arithmetic}"])


def compare(options: VerifyOptions, path: Path, progress: Progress = no_progress) -> Report:
    """Decodes the texts of a transcript again. `ok`: all tokens are equal. Raises UsageError for a file that is none,
    and for one of another model or other options."""
    theirs = _read(path)
    llm = LLM(options.model, options.config)
    ours = _described(llm)
    if (theirs.weights, theirs.options) != (ours["weights"], ours["options"]):
        made_of = f"{theirs.model} ({theirs.weights}, {theirs.options})"
        what = f"--against: {path} is of {made_of}, but this is {ours['model']} ({ours['weights']}, {ours['options']})"
        raise UsageError(what, "name the same model, --quantization and --kv-cache-dtype")
    names = {"": ""} | {adapter.digest: name for name, adapter in llm.engine.adapters.loaded.items()}
    if missing := {each.adapter for each in theirs.texts} - names.keys():
        what = f"--against: {path} has texts of an adapter with digest {min(missing)}, which is not loaded"
        raise UsageError(what, "name the same adapters: --lora NAME=PATH")
    prompts = [
        _Prompt(each.prompt_ids, SamplingParams(temperature=each.temperature, seed=each.seed,
                                                max_tokens=each.max_tokens), names[each.adapter])
        for each in theirs.texts
    ]  # fmt: skip
    found = list(_decoded(llm, prompts, True, progress))
    differences = [
        Difference(number, *found_at)
        for number, (a, b) in enumerate(zip(theirs.texts, found, strict=True))
        if (found_at := first_different_tokens(a.token_ids, b.token_ids))
    ]
    same, tokens = len(found) - len(differences), sum(len(each.token_ids) for each in found)
    data = {
        "ok": not differences, "against": str(path), "identical": same, "texts": len(found), "tokens": tokens,
        "theirs": {"machine": theirs.machine, "arithmetic": theirs.arithmetic, "headstart": theirs.headstart},
        "found": [vars(each) for each in differences], **ours,
    }  # fmt: skip
    lines = [
        f"{path}: {theirs.model} by {theirs.arithmetic} ({theirs.machine})",
        f"here: {ours['arithmetic']} ({ours['machine']})",
        *(_line(theirs.texts[each.text], each) for each in differences[:1]),
        f"identical {same}/{len(found)} texts, {tokens} tokens compared",
    ]
    if differences and not options.config.portable_bits:
        lines.append("  paths with products of bfloat16 round differently: both sides need --portable-bits")
    return Report(ok=not differences, data=data, lines=lines)


def _line(text: Text, found: Difference) -> str:
    what = f"{found.theirs} there, {found.ours} here" if found.theirs >= 0 else "one text ends there"
    asked = f"T {text.temperature:g}, seed {text.seed}"
    return f"  DIFFERENT: text {found.text} ({asked}), output token {found.position}: {what}"


def _described(llm: LLM) -> dict[str, Any]:
    model, config = llm.model, llm.config
    path = getattr(model.backend, "path", "")
    return {
        "headstart": __version__, "model": model.name, "weights": weights_fingerprint(model.weights.tensors),
        "options": [config.rounding, config.kv_cache_dtype], "machine": f"{platform.system()} {platform.machine()}",
        "arithmetic": f"{model.backend.name} {path}".strip() + (", portable bits" if config.portable_bits else ""),
    }  # fmt: skip


class _Prompt(NamedTuple):
    prompt: Prompt
    params: SamplingParams
    lora: str  # name of the adapter; empty: the model as it is


def _decoded(llm: LLM, prompts: Sequence[_Prompt], raw: bool, progress: Progress) -> Iterator[Text]:
    done = iter(range(1, len(prompts) + 1))

    def finished(index: int, completion: Any) -> None:
        progress(next(done), len(prompts), "decoding")

    params, loras = [each.params for each in prompts], [each.lora for each in prompts]
    completions = llm.generate([each.prompt for each in prompts], params, raw=raw, lora=loras, on_finish=finished)
    for completion, used, name in zip(completions, params, loras, strict=True):
        yield Text(
            prompt_ids=list(completion.prompt_token_ids), temperature=used.temperature, seed=used.seed or 0,
            max_tokens=used.max_tokens or 0, token_ids=list(completion.token_ids),
            adapter=llm.engine.adapters.find(name).digest if name else "",
        )  # fmt: skip


def _read(path: Path) -> Transcript:
    try:
        return Transcript.model_validate(json.loads(read_regular(path, MAX_BYTES)))
    except OSError as error:
        raise UsageError(f"--against: cannot read {path}: {error.strerror}", "or: --against transformers") from None
    except (ValueError, RecursionError) as error:
        where = f" at {'.'.join(map(str, error.errors()[0]['loc']))}" if isinstance(error, ValidationError) else ""
        raise UsageError(f"--against: {path} is no transcript{where}", "write one: verify --transcript FILE") from None
