"""`headstart verify`: the token ids of every way of running against plain decoding, one prompt at a time.

Only the first difference of a prompt counts: what follows has another context. Where arithmetic is exact only up to
rounding (float32), a difference is a *tie* when a float64 recomputation of that one row puts the two tokens' scores
(l + g) within TIE of each other. In float64 nothing is excused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import Report, SamplingParams
from headstart.engine.load import Model, load_model, make_engine
from headstart.errors import UsageError
from headstart.tools.covering import Cell, pairwise
from headstart.tools.margin import TIE, Judge
from headstart.tools.prompts import builtin_prompts

Progress = Callable[[int, int, str], None]
Prompt = str | list[int]
PLAIN = "none"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What to compare. Every pair of levels of two factors is covered by at least one cell."""

    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    prompts: tuple[Prompt, ...] | None = None
    raw: bool = False
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    depths: tuple[int, ...] = (1, 3, 5)
    drafters: tuple[str, ...] = ("mtp", "ngram")
    batch_sizes: tuple[int, ...] = (1, 8)
    chunk_sizes: tuple[int, ...] = (32, 512)
    prefix_caching: tuple[bool, ...] = (True, False)
    seeds: tuple[int, ...] = (0,)
    against: str | None = None

    def factors(self) -> dict[str, tuple[Any, ...]]:
        return {
            "temperature": self.temperatures,
            "depth": self.depths,
            "drafter": self.drafters,
            "batch": self.batch_sizes,
            "chunk": self.chunk_sizes,
            "cache": self.prefix_caching,
            "seed": self.seeds,
        }


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt that differs from plain decoding."""

    cell: Cell
    prompt: int
    position: int  # output token, from 0
    plain: int
    other: int
    margin: float | None  # |score of plain - score of other| in float64; None when one text ends before the other
    tie: bool


@dataclass
class CellResult:
    """One cell over all prompts."""

    cell: Cell
    num_tokens: int
    acceptance_length: float
    differences: list[Difference]


def run(options: VerifyOptions, progress: Progress = lambda done, total, text: None) -> Report:
    """Run every cell. Raises UsageError for drafters that this model cannot feed."""
    if options.against:
        from headstart.tools.against import run_against  # transformers is imported only when it is asked for

        return run_against(options, progress)
    if options.config.rule != "exact":
        raise UsageError(f"--rule {options.config.rule} promises the same distribution, not the same text")
    model = load_model(options.model, options.config)
    for drafter in options.drafters:  # whatever does not fit is said before the work begins
        make_engine(model, replace(options.config, drafter=drafter, depth=max(options.depths)))
    prompts = list(options.prompts or [prompt for _, prompt in builtin_prompts()])
    cells = pairwise(options.factors())
    baselines = sorted({(cell["temperature"], cell["seed"]) for cell in cells})
    total = (len(cells) + len(baselines)) * len(prompts)
    done = 0

    def advance(text: str) -> Callable[[int, Any], None]:
        def finished(index: int, completion: Any) -> None:
            nonlocal done
            done += 1
            progress(done, total, text)

        return finished

    plain = {
        key: _decode(model, options, plain_cell(*key), prompts, advance(f"plain decoding, T = {key[0]:g}"))[0]
        for key in baselines
    }
    judge = Judge(options.model, options.config, 0.0 if options.config.dtype == "float64" else TIE)
    results = []
    for number, cell in enumerate(cells, 1):
        others, length = _decode(model, options, cell, prompts, advance(f"cell {number}/{len(cells)}"))
        expected = plain[cell["temperature"], cell["seed"]]
        found = [_compare(cell, i, a, b, judge) for i, (a, b) in enumerate(zip(expected, others, strict=True))]
        num_tokens = sum(len(tokens) for _, tokens in others)
        results.append(CellResult(cell, num_tokens, length, [each for each in found if each]))
    return summarize(model, options, results, len(prompts))


def plain_cell(temperature: float, seed: int) -> Cell:
    """Plain decoding: one sequence, no drafter, no cached prefix, prompts in one chunk."""
    fixed = {"depth": 0, "drafter": PLAIN, "batch": 1, "chunk": 512, "cache": False}
    return {"temperature": temperature, "seed": seed, **fixed}


Decoded = tuple[list[int], list[int]]
"""Prompt ids, output ids."""


def _decode(
    model: Model, options: VerifyOptions, cell: Cell, prompts: Sequence[Prompt], on_finish: Callable[[int, Any], None]
) -> tuple[list[Decoded], float]:
    config = replace(
        options.config,
        drafter=cell["drafter"],
        depth=cell["depth"],
        max_num_seqs=cell["batch"],
        max_num_batched_tokens=cell["chunk"],
        enable_prefix_caching=cell["cache"],
    )
    llm = LLM(model, config)
    params = [params_of(cell, index, options.max_tokens) for index in range(len(prompts))]
    if cell["cache"]:  # a first visit, so that the second one starts from cached blocks
        llm.generate(prompts, SamplingParams(max_tokens=1), raw=options.raw)
    completions = llm.generate(prompts, params, raw=options.raw, on_finish=on_finish)
    decoded = [(each.prompt_token_ids, each.token_ids) for each in completions]
    return decoded, llm.engine.stats.acceptance_length


def params_of(cell: Cell, index: int, max_tokens: int) -> SamplingParams:
    """Each prompt has a seed of its own, the same in every cell."""
    return SamplingParams(temperature=cell["temperature"], seed=cell["seed"] * 1_000_003 + index, max_tokens=max_tokens)


def _compare(cell: Cell, index: int, plain: Decoded, other: Decoded, judge: Judge) -> Difference | None:
    (prompt, expected), (_, found) = plain, other
    if expected == found:
        return None
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if at is None:  # one is a prefix of the other: no tie can explain that
        at = min(len(expected), len(found))
        return Difference(cell, index, at, -1, -1, None, False)
    params = params_of(cell, index, 1)
    margin, tie = judge.margin([*prompt, *expected[:at]], expected[at], found[at], params)
    return Difference(cell, index, at, expected[at], found[at], margin, tie)


def summarize(model: Model, options: VerifyOptions, results: list[CellResult], num_prompts: int) -> Report:
    """identical / total, ties, differences; ok when every difference is a tie."""
    found = [each for result in results for each in result.differences]
    wrong = [each for each in found if not each.tie]
    pairs, tokens = len(results) * num_prompts, sum(result.num_tokens for result in results)
    ties = len(found) - len(wrong)
    data = {
        "ok": not wrong,
        "model": model.name,
        "backend": model.backend.name,
        "dtype": options.config.dtype,
        "prompts": num_prompts,
        "cells": [{**r.cell, "tokens": r.num_tokens, "acceptance_length": r.acceptance_length} for r in results],
        "texts": pairs,
        "identical": pairs - len(found),
        "tokens": tokens,
        "ties": ties,
        "differences": len(wrong),
        "found": [asdict(each) for each in found],
    }
    lines = [_cell_line(result, num_prompts) for result in results]
    lines += [
        f"  {'tie' if each.tie else 'DIFFERENT'}: prompt {each.prompt}, output token {each.position}: "
        f"{_values(each)}, in {_name(each.cell)}"
        for each in found
    ]
    lines.append(
        f"identical {pairs - len(found)}/{pairs} texts over {len(results)} cells, {tokens} tokens compared; "
        f"ties {ties}, differences {len(wrong)}"
    )
    lines.append(
        f"scope: backend {model.backend.name}, {options.config.dtype}; the text is a function of weights, prompt, "
        "sampling parameters and seed" + ("" if options.config.dtype == "float64" else ", up to numeric ties")
    )
    return Report(ok=not wrong, data=data, lines=lines)


def _values(each: Difference) -> str:
    if each.margin is None:
        return "one text ends there"
    return f"{each.plain} and {each.other}, margin {each.margin:.2g}"


def _name(cell: Cell) -> str:
    cache = "on" if cell["cache"] else "off"
    return (
        f"T {cell['temperature']:g}, {cell['drafter']} depth {cell['depth']}, batch {cell['batch']}, "
        f"chunk {cell['chunk']}, cache {cache}, seed {cell['seed']}"
    )


def _cell_line(result: CellResult, num_prompts: int) -> str:
    same = num_prompts - len(result.differences)
    return f"{_name(result.cell)}: identical {same}/{num_prompts}, acceptance length {result.acceptance_length:.2f}"
