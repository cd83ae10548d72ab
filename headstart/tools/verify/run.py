"""`headstart verify`: the token ids of every way of running against plain decoding, one prompt at a time.

Only the first difference of a prompt counts: what follows has another context. Where arithmetic is exact only up to
rounding (`reference` in float32), a difference is a *tie* when a float64 recomputation of that one row puts the two
tokens' scores (l + g) within TIE of each other. In float64, and on every other backend, nothing is excused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from headstart import machine
from headstart.api import LLM
from headstart.config import AUTO, EngineConfig
from headstart.core import Progress, Report, SamplingParams, no_progress
from headstart.engine.draft_model import DRAFT_MODEL
from headstart.engine.load import Model, load_model, other_heads
from headstart.engine.make import make_engine
from headstart.errors import UsageError
from headstart.kernels.backend import choose, kind_of
from headstart.tools.prompts import builtin_prompts
from headstart.tools.verify.covering import Cell, pairwise
from headstart.tools.verify.margin import TIE, Judge
from headstart.tools.verify.options import DEPTHS, FULL_DEPTHS, VerifyOptions, default_drafters

PLAIN = "none"
GRID_SEED = 0
"""Of the choice of cells; `VerifyOptions.seeds` are those of the texts."""


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt that differs from plain decoding; tokens are -1 when one text ends before the
    other."""

    cell: Cell
    prompt: int
    position: int  # output token, from 0
    plain: int
    other: int
    margin: float | None = None  # |score of plain - score of other| in float64, where that says something
    tie: bool = False


@dataclass
class CellResult:
    """One cell over all prompts."""

    cell: Cell
    num_tokens: int
    acceptance_length: float
    preemptions: int
    differences: list[Difference]


@dataclass(frozen=True)
class Decoded:
    """Token ids of one prompt and of its answer."""

    prompt: list[int]
    answer: list[int]


def run(options: VerifyOptions, progress: Progress = no_progress) -> Report:
    """Run every cell. Raises UsageError for drafters that this model cannot feed."""
    if options.against:
        from headstart.tools.verify.against import run_against  # transformers is imported only when it is asked for

        return run_against(options, progress)
    if options.config.synthetic_acceptance:
        raise UsageError("--synthetic-acceptance makes a text that is not the model's", "verify without it")
    if options.config.rule != "exact":
        raise UsageError(f"--rule {options.config.rule} promises the same distribution, not the same text")
    backend = choose(options.config)
    exact = backend.kind.exact
    threads = options.thread_counts or default_threads(options.config, exact=exact)
    options = replace(options, thread_counts=threads)
    drafters, loaded = options.drafters, dict[int, Model]()
    if not drafters:
        check_ranges(options)  # before a model is loaded
        loaded[threads[0]] = model = load_model(options.model, replace(options.config, threads=threads[0]))
        drafters = default_drafters(options, model.head.spec.kind if model.head else None)
    work = _Verification(replace(options, drafters=drafters), progress)
    for count in threads:
        config = replace(options.config, threads=count)
        if DRAFT_MODEL in drafters:  # then --head is a whole model
            config = replace(config, drafter=DRAFT_MODEL)
        work.run_cells(loaded.pop(count) if count in loaded else load_model(options.model, config), count)
    excusable = not exact and options.config.dtype != "float64"
    if not exact:  # else float64 scores say nothing about what this backend computes
        work.judge(Judge(options.model, options.config, TIE if excusable else 0.0))
    return summarize(work.name, backend.name, work.options, work.results, len(work.prompts), excusable)


def default_threads(config: EngineConfig, *, exact: bool) -> tuple[int, ...]:
    """What the user said, else 1 and 2 as far as there are cores; what rounds by threads gets them all."""
    if config.threads:
        return (config.threads,)
    usable = machine.threads().usable
    return tuple(range(1, min(usable, 2) + 1)) if exact else (usable,)


def check_ranges(options: VerifyOptions) -> None:
    """Raises UsageError for a value that no cell can have: each alone, so that no cells are needed for it."""
    levels = options.factors()
    for name, values in levels.items():
        for value in values:
            cell = {each: some[0] for each, some in levels.items()} | {name: value}
            _config(options, cell)
            params_of(cell, 0, options.max_tokens)


class _Verification:
    """The cells of a run, what plain decoding says, and what has been found so far."""

    def __init__(self, options: VerifyOptions, progress: Progress) -> None:
        self.options, self._progress = options, progress
        self.prompts = list(options.prompts or [prompt for _, prompt in builtin_prompts()])
        self.results: list[CellResult] = []
        self.name = ""  # the model's
        wanted = -(-options.min_texts // len(self.prompts))
        cells = pairwise(options.factors(), GRID_SEED, wanted)
        self._cells = [cell for count in options.thread_counts for cell in cells if cell["threads"] == count]
        check_ranges(options)
        self._plain: dict[tuple[float, int], list[Decoded]] = {}
        self._baselines = sorted({_key(cell) for cell in cells})
        self._headed: Mapping[str, Model] = {}  # by drafter, where it is not the model as it comes
        self._done, self._total = 0, (len(cells) + len(self._baselines)) * len(self.prompts)

    def run_cells(self, model: Model, threads: int) -> None:
        """All cells of one thread count, on a model loaded for it; plain decoding before the first."""
        options = self.options
        self._headed = {} if options.config.head else other_heads(model)
        if not self._plain:
            self.name = model.name
            self._fit_depths(model)
            for temperature, seed in self._baselines:
                config = _config(options, plain_cell(temperature, seed, threads))
                llm = LLM(model, config)
                text = f"plain decoding, T = {temperature:g}"
                self._plain[temperature, seed] = self._decode(llm, plain_cell(temperature, seed, threads), text)
        for number, cell in enumerate(self._cells, 1):
            if cell["threads"] == threads:
                self.results.append(self._run_cell(model, cell, f"cell {number}/{len(self._cells)}"))

    def _fit_depths(self, model: Model) -> None:
        """Depths within what each drafter can: those that nobody asked for are lowered. Raises UsageError, before the
        work begins, for others, and for a drafter that does not fit."""
        options, most = self.options, {}
        deepest = max((depth for depth in options.depths if depth != AUTO), default=AUTO)
        usual = options.depths in (DEPTHS, FULL_DEPTHS)
        for drafter in options.drafters:
            headed = self._headed.get(drafter, model)
            engine = make_engine(headed, replace(options.config, drafter=drafter, depth=1 if usual else deepest))
            most[drafter] = engine.drafting.max_depth
        fitting = [
            {**cell, "depth": cell["depth"] if cell["depth"] == AUTO else min(cell["depth"], most[cell["drafter"]])}
            for cell in self._cells
        ]
        self._cells = [cell for index, cell in enumerate(fitting) if cell not in fitting[:index]]
        self._total = (len(self._cells) + len(self._baselines)) * len(self.prompts)

    def _run_cell(self, model: Model, cell: Cell, text: str) -> CellResult:
        expected = self._plain[_key(cell)]
        config = _config(self.options, cell)
        model = self._headed.get(cell["drafter"], model)
        llm = LLM(model, _scarce(config, expected, model.config.max_length) if cell["preemption"] else config)
        if cell["cache"]:  # a first visit, so that the second one starts from cached blocks
            llm.generate(self.prompts, SamplingParams(max_tokens=1), raw=self.options.raw)
        decoded = self._decode(llm, cell, text)
        pairs = enumerate(zip(expected, decoded, strict=True))
        return CellResult(
            cell,
            sum(len(each.answer) for each in decoded),
            llm.engine.stats.acceptance_length,
            llm.engine.scheduler.num_preemptions,
            [each for index, (plain, other) in pairs for each in _compare(cell, index, plain.answer, other.answer)],
        )

    def _decode(self, llm: LLM, cell: Cell, text: str) -> list[Decoded]:
        def finished(index: int, completion: Any) -> None:
            self._done += 1
            self._progress(self._done, self._total, text)

        order = list(range(len(self.prompts)))
        if cell["preemption"]:  # the longest meet, and need more blocks than there are
            expected = self._plain[_key(cell)]
            order.sort(key=lambda index: -len(expected[index].prompt))
        params = [params_of(cell, index, self.options.max_tokens) for index in order]
        prompts = [self.prompts[index] for index in order]
        completions = llm.generate(prompts, params, raw=self.options.raw, on_finish=finished)
        by_index = {
            index: Decoded(c.prompt_token_ids, c.token_ids) for index, c in zip(order, completions, strict=True)
        }
        return [by_index[index] for index in range(len(order))]

    def judge(self, judge: Judge) -> None:
        """Put a margin to every difference. Comes last: loading the judge's model may change torch's threads."""
        for result in self.results:
            result.differences = [self._judged(each, judge) for each in result.differences]

    def _judged(self, each: Difference, judge: Judge) -> Difference:
        if each.plain < 0:  # no tie can explain that a text goes on
            return each
        plain = self._plain[_key(each.cell)][each.prompt]
        context = [*plain.prompt, *plain.answer[: each.position]]
        margin, tie = judge.margin(context, each.plain, each.other, params_of(each.cell, each.prompt, 1))
        return replace(each, margin=margin, tie=tie)


def _key(cell: Cell) -> tuple[float, int]:
    """What plain decoding depends on."""
    return cell["temperature"], cell["seed"]


def plain_cell(temperature: float, seed: int, threads: int) -> Cell:
    """Plain decoding: one sequence, no drafter, no cached prefix, prompts in one chunk."""
    fixed = {"depth": 0, "drafter": PLAIN, "batch": 1, "chunk": 512, "cache": False, "preemption": False}
    return {"temperature": temperature, "seed": seed, "threads": threads, **fixed}


def _config(options: VerifyOptions, cell: Cell) -> EngineConfig:
    return replace(
        options.config,
        drafter=cell["drafter"],
        depth=cell["depth"],
        max_num_seqs=cell["batch"],
        max_num_batched_tokens=cell["chunk"],
        enable_prefix_caching=cell["cache"],
        threads=cell["threads"],
    )


def _scarce(config: EngineConfig, texts: list[Decoded], context: int) -> EngineConfig:
    """Blocks for the two longest prompts, but not for their answers too: as these grow, one sequence has to go."""

    def blocks(num_tokens: int) -> int:
        return -(-num_tokens // config.block_size)

    # one token more than the longest text has, so that a text which goes on shows
    longest = min(1 + max(len(each.prompt) + len(each.answer) for each in texts), config.max_model_len or context)
    prompts = sorted(len(each.prompt) for each in texts)
    enough = max(blocks(longest), sum(map(blocks, prompts[-2:])))
    return replace(config, max_model_len=longest, kv_blocks=enough)


def params_of(cell: Cell, index: int, max_tokens: int) -> SamplingParams:
    """Each prompt has a seed of its own, the same in every cell."""
    return SamplingParams(temperature=cell["temperature"], seed=cell["seed"] * 1_000_003 + index, max_tokens=max_tokens)


def _compare(cell: Cell, index: int, plain: list[int], other: list[int]) -> Iterator[Difference]:
    """The first difference of two answers, if there is one."""
    if plain == other:
        return
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:  # one is a prefix of the other
        yield Difference(cell, index, min(len(plain), len(other)), -1, -1)
    else:
        yield Difference(cell, index, at, plain[at], other[at])


def summarize(
    name: str, backend: str, options: VerifyOptions, results: list[CellResult], num_prompts: int, excusable: bool
) -> Report:
    """identical / total, ties, differences; ok when every difference is a tie."""
    differences = [each for result in results for each in result.differences]
    wrong = [each for each in differences if not each.tie]
    pairs, tokens = len(results) * num_prompts, sum(result.num_tokens for result in results)
    ties, preemptions = len(differences) - len(wrong), sum(result.preemptions for result in results)
    data = {
        "ok": not wrong,
        "model": name,
        "backend": backend,
        "dtype": options.config.dtype,
        "prompts": num_prompts,
        "seeds": list(options.seeds),
        "grid_seed": GRID_SEED,
        "cells": [
            {
                **result.cell,
                "tokens": result.num_tokens,
                "acceptance_length": result.acceptance_length,
                "preemptions": result.preemptions,
            }
            for result in results
        ],
        "texts": pairs,
        "identical": pairs - len(differences),
        "tokens": tokens,
        "preemptions": preemptions,
        "ties": ties,
        "differences": len(wrong),
        "found": [asdict(each) for each in differences],
    }
    seeds = ", ".join(map(str, options.seeds))
    arithmetic = f", {options.config.dtype}" if kind_of(backend).widens else ""
    lines = [
        *(_cell_line(result, num_prompts) for result in results),
        *(_difference_line(each) for each in differences),
        f"seeds {seeds} (grid {GRID_SEED}); {_preempted(results, num_prompts)}",
        f"identical {pairs - len(differences)}/{pairs} texts over {len(results)} cells, {tokens} tokens compared; "
        f"ties {ties}, differences {len(wrong)}",
        f"scope: backend {backend}{arithmetic}; the text is a function of weights, prompt, "
        "sampling parameters and seed" + (", up to numeric ties" if excusable else ""),
    ]
    return Report(ok=not wrong, data=data, lines=lines)


def _preempted(results: list[CellResult], num_prompts: int) -> str:
    """How often, and in how many of the cells where two sequences could be in each other's way."""
    able = [
        result
        for result in results
        if result.cell["preemption"] and min(result.cell["batch"], result.cell["chunk"], num_prompts) > 1
    ]
    if not able:
        return "no cell in which sequences could preempt each other (two prompts or more, batches above 1)"
    hit = sum(result.preemptions > 0 for result in able)
    return f"{sum(result.preemptions for result in results)} preemptions, in {hit} of {len(able)} cells made for them"


def _difference_line(each: Difference) -> str:
    if each.plain < 0:
        what = "one text ends there"
    else:
        what = f"{each.plain} and {each.other}"
        what += "" if each.margin is None else f", margin {each.margin:.2g}"
    word = "tie" if each.tie else "DIFFERENT"
    return f"  {word}: prompt {each.prompt}, output token {each.position}: {what}, in {_name(each.cell)}"


def _name(cell: Cell) -> str:
    switches = ", ".join(f"{name} {'on' if cell[name] else 'off'}" for name in ("cache", "preemption"))
    return (
        f"T {cell['temperature']:g}, {cell['drafter']} depth {cell['depth']}, batch {cell['batch']}, "
        f"chunk {cell['chunk']}, {switches}, threads {cell['threads']}, seed {cell['seed']}"
    )


def _cell_line(result: CellResult, num_prompts: int) -> str:
    same = num_prompts - len(result.differences)
    line = f"{_name(result.cell)}: identical {same}/{num_prompts}, acceptance length {result.acceptance_length:.2f}"
    return line + (f", {result.preemptions} preemptions" if result.preemptions else "")
