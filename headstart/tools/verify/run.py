"""`headstart verify`: compares the token ids of every configuration with plain decoding of one prompt at a time.

Only the first difference of a prompt counts, since later tokens have another context. On a backend that is exact only
up to rounding (`reference` in float32), a difference is a *tie* when a float64 recomputation of that row puts the two
tokens' scores (l + g) within TIE of each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from headstart import machine
from headstart.api import LLM
from headstart.config import AUTO, EngineConfig
from headstart.core import Progress, Report, SamplingParams, no_progress
from headstart.engine.build import build_engine
from headstart.engine.load import DRAFT_MODEL, Model, load_model, other_heads
from headstart.errors import UsageError
from headstart.kernels.backend import backend_kind, select_backend
from headstart.tools.prompts import first_different_tokens
from headstart.tools.verify import transcript
from headstart.tools.verify.options import (
    DEPTHS,
    FULL_DEPTHS,
    TRANSFORMERS,
    GridCell,
    VerifyOptions,
    default_drafters,
    pairwise,
    prompt_seed,
)
from headstart.tools.verify.references import TIE, TieChecker, compare_transformers

PLAIN_CELL = {"depth": 0, "drafter": "none", "batch": 1, "chunk": 512, "cache": False, "preemption": False}
GRID_SEED = 0  # of the choice of cells; `VerifyOptions.seeds` are those of the texts


@dataclass
class TokenDifference:
    cell: GridCell
    prompt: int
    position: int  # index of the output token
    plain: int  # token id of plain decoding; -1: one of the texts ends there
    other: int  # token id of the cell
    margin: float | None = None  # |score of plain - score of other| in float64; None: not computed
    tie: bool = False


@dataclass
class CellResult:
    cell: GridCell
    num_prompts: int
    num_tokens: int
    acceptance_length: float
    preemptions: int
    differences: list[TokenDifference]


class DecodedPrompt(NamedTuple):
    prompt: list[int]
    answer: list[int]


def run(options: VerifyOptions, progress: Progress = no_progress) -> Report:
    """Runs every cell and reports differences. Raises UsageError for a drafter or depth that the model lacks, and for
    options that change the text on purpose."""
    if options.against == TRANSFORMERS:
        return compare_transformers(options, progress)
    if options.config.synthetic_acceptance:
        raise UsageError("--synthetic-acceptance changes the model's text", "verify without it")
    if options.config.rule != "exact":
        raise UsageError(f"--rule {options.config.rule} promises the same distribution, not the same text")
    if options.transcript:
        return transcript.write(options, options.transcript, progress)
    if options.against:
        return transcript.compare(options, Path(options.against), progress)
    backend = select_backend(options.config)
    exact = backend.kind.exact
    threads = options.thread_counts or default_threads(options.config, exact=exact)
    options = replace(options, thread_counts=threads)
    runs = _run_all(options, progress)
    excusable = not exact and options.config.dtype != "float64"
    if not exact:  # an exact backend's scores cannot be compared with float64 scores
        referee = TieChecker(options.model, options.config, TIE if excusable else 0.0)
        for work in runs:
            work.judge_ties(referee)
    return summarize(backend.name, options, runs, excusable)


def _run_all(options: VerifyOptions, progress: Progress) -> "list[VerificationRun]":
    """Runs the cells over all prompts, then those over long prompts."""
    check_ranges(options)
    threads, loaded = options.thread_counts, dict[int, Model]()
    if not options.drafters:
        loaded[threads[0]] = model = load_model(options.model, replace(options.config, threads=threads[0]))
        options = replace(options, drafters=default_drafters(model, options.config))
    runs = [VerificationRun(options, progress)]
    for count in threads:
        config = replace(options.config, threads=count)
        if DRAFT_MODEL in options.drafters:  # then --head is a whole model
            config = replace(config, drafter=DRAFT_MODEL)
        model = loaded.pop(count) if count in loaded else load_model(options.model, config)
        if count == threads[0] and (long := options.long_contexts(model)):
            runs.append(VerificationRun(long, progress, first=len(options.texts)))
        for work in runs:
            work.run_cells(model, count)
    return runs


def default_threads(config: EngineConfig, *, exact: bool) -> tuple[int, ...]:
    """Returns the user's thread count, else 1 and 2 (as far as there are cores); for an inexact backend, whose rounding
    depends on threads, only the number of cores."""
    if config.threads:
        return (config.threads,)
    usable = machine.threads().usable
    return tuple(range(1, min(usable, 2) + 1)) if exact else (usable,)


def check_ranges(options: VerifyOptions) -> None:
    """Raises UsageError for a level that is invalid in every cell; checks each level separately."""
    levels = options.factors()
    for name, values in levels.items():
        for value in values:
            cell = {each: some[0] for each, some in levels.items()} | {name: value}
            _config(options, cell)
            params_of(cell, 0, options.max_tokens)


class VerificationRun:
    """Cells over one list of prompts. first: number of the first prompt in the report."""

    def __init__(self, options: VerifyOptions, progress: Progress, first: int = 0) -> None:
        self.options, self._progress, self._first = options, progress, first
        self.prompts = options.texts
        self._loras = options.loras
        self.results: list[CellResult] = []
        self.name = ""  # the model's
        cells = pairwise(options.factors(), GRID_SEED, -(-options.min_texts // len(self.prompts)))
        self._cells = [cell for count in options.thread_counts for cell in cells if cell["threads"] == count]
        self._plain: dict[tuple[float, int], list[DecodedPrompt]] = {}
        self._baselines = sorted({_key(cell) for cell in cells})
        self._headed: Mapping[str, Model] = {}  # drafter -> the model with another shipped head
        self._done = self._total = 0  # texts

    def run_cells(self, model: Model, threads: int) -> None:
        """Runs all cells of one thread count, on a model loaded for that count. The first call also runs plain
        decoding, with which all cells are compared."""
        options = self.options
        self._headed = {} if options.config.head else other_heads(model)
        if not self._plain:
            self.name = model.name
            self._fit_depths(model)
            for temperature, seed in self._baselines:
                cell = PLAIN_CELL | {"temperature": temperature, "seed": seed, "threads": threads}
                llm, text = LLM(model, _config(options, cell)), f"plain decoding, T = {temperature:g}"
                self._plain[temperature, seed] = self._decode(llm, cell, text)
        for number, cell in enumerate(self._cells, 1):
            if cell["threads"] == threads:
                self.results.append(self._run_cell(model, cell, f"cell {number}/{len(self._cells)}"))

    def _fit_depths(self, model: Model) -> None:
        """Lowers default depths to the drafters' limits. Raises UsageError for a user's depth above a limit."""
        options, limits = self.options, {}
        deepest = max((depth for depth in options.depths if depth != AUTO), default=AUTO)
        is_default = options.depths in (DEPTHS, FULL_DEPTHS)
        for drafter in options.drafters:
            headed = self._headed.get(drafter, model)
            engine = build_engine(headed, replace(options.config, drafter=drafter, depth=1 if is_default else deepest))
            limits[drafter] = engine.drafting.max_depth
        fitting = []
        for cell in self._cells:
            depth = cell["depth"]
            fitting.append({**cell, "depth": depth if depth == AUTO else min(depth, limits[cell["drafter"]])})
        self._cells = [cell for index, cell in enumerate(fitting) if cell not in fitting[:index]]
        self._total = (len(self._cells) + len(self._baselines)) * len(self.prompts)

    def _run_cell(self, model: Model, cell: GridCell, text: str) -> CellResult:
        expected = self._plain[_key(cell)]
        config = _config(self.options, cell)
        model = self._headed.get(cell["drafter"], model)
        llm = LLM(model, _with_few_blocks(config, expected, model.config.max_length) if cell["preemption"] else config)
        llm.engine.head_health.is_enabled = False
        if cell["cache"]:  # fills the prefix cache, so that the compared run starts from cached blocks
            llm.generate(self.prompts, SamplingParams(max_tokens=1), raw=self.options.raw, lora=self._loras)
        decoded, differences = self._decode(llm, cell, text), []
        for index, ((_, plain), (_, other)) in enumerate(zip(expected, decoded, strict=True), self._first):
            if tokens := first_different_tokens(plain, other):
                differences.append(TokenDifference(cell, index, *tokens))
        acceptance_length, preemptions = llm.engine.stats.acceptance_length, llm.engine.scheduler.num_preemptions
        num_tokens = sum(len(each.answer) for each in decoded)
        return CellResult(cell, len(expected), num_tokens, acceptance_length, preemptions, differences)

    def _decode(self, llm: LLM, cell: GridCell, text: str) -> list[DecodedPrompt]:
        def finished(index: int, completion: Any) -> None:
            self._done += 1
            self._progress(self._done, self._total, text)

        order = list(range(len(self.prompts)))
        if cell["preemption"]:  # the longest prompts run together, and need more blocks than there are
            expected = self._plain[_key(cell)]
            order.sort(key=lambda index: -len(expected[index].prompt))
        params = [params_of(cell, index, self.options.max_tokens) for index in order]
        prompts = [self.prompts[index] for index in order]
        loras = [self._loras[index] for index in order]
        completions = llm.generate(prompts, params, raw=self.options.raw, lora=loras, on_finish=finished)
        decoded = dict(zip(order, completions, strict=True))
        return [DecodedPrompt(decoded[i].prompt_token_ids, decoded[i].token_ids) for i in range(len(order))]

    def judge_ties(self, referee: TieChecker) -> None:
        """Sets `margin` and `tie` of each difference except where a text ends. Must run last, since loading the referee
        may change torch's thread count."""
        for each in (each for result in self.results for each in result.differences if each.plain >= 0):
            index = each.prompt - self._first
            plain = self._plain[_key(each.cell)][index]
            context, params = [*plain.prompt, *plain.answer[: each.position]], params_of(each.cell, index, 1)
            each.margin, each.tie = referee.margin(context, each.plain, each.other, params, self._loras[index])


def _key(cell: GridCell) -> tuple[float, int]:
    """Returns (temperature, seed), on which plain decoding depends."""
    return cell["temperature"], cell["seed"]


def _config(options: VerifyOptions, cell: GridCell) -> EngineConfig:
    return replace(
        options.config, drafter=cell["drafter"], depth=cell["depth"], max_num_seqs=cell["batch"],
        max_num_batched_tokens=cell["chunk"], enable_prefix_caching=cell["cache"], threads=cell["threads"],
    )  # fmt: skip


def _with_few_blocks(config: EngineConfig, texts: list[DecodedPrompt], context: int) -> EngineConfig:
    """Returns a config with KV blocks for the two longest prompts only, so that a sequence is preempted."""

    def blocks(num_tokens: int) -> int:
        return -(-num_tokens // config.block_size)

    # one token more than the longest text has, so that a text which goes on shows
    longest = min(1 + max(len(each.prompt) + len(each.answer) for each in texts), config.max_model_len or context)
    prompts = sorted(len(each.prompt) for each in texts)
    enough = max(blocks(longest), sum(map(blocks, prompts[-2:])))
    return replace(config, max_model_len=longest, kv_blocks=enough)


def params_of(cell: GridCell, index: int, max_tokens: int) -> SamplingParams:
    """Returns the sampling parameters of prompt `index`; each prompt has its own seed, the same in every cell."""
    return SamplingParams(temperature=cell["temperature"], seed=prompt_seed(cell["seed"], index), max_tokens=max_tokens)


def summarize(backend: str, options: VerifyOptions, runs: Sequence[VerificationRun], excusable: bool) -> Report:
    """Returns the report of all cells; `ok`: every difference is a tie."""
    results = [result for work in runs for result in work.results]
    differences = [each for result in results for each in result.differences]
    wrong = [each for each in differences if not each.tie]
    pairs, tokens = sum(result.num_prompts for result in results), sum(result.num_tokens for result in results)
    ties, preemptions = len(differences) - len(wrong), sum(result.preemptions for result in results)
    data = {
        "ok": not wrong,
        "model": runs[0].name,
        "backend": backend,
        "dtype": options.config.dtype,
        "prompts": sum(len(work.prompts) for work in runs),
        "seeds": list(options.seeds),
        "grid_seed": GRID_SEED,
        "cells": [
            {**each.cell, "prompts": each.num_prompts, "tokens": each.num_tokens,
             "acceptance_length": each.acceptance_length, "preemptions": each.preemptions}
            for each in results
        ],
        "texts": pairs,
        "identical": pairs - len(differences),
        "tokens": tokens,
        "preemptions": preemptions,
        "ties": ties,
        "differences": len(wrong),
        "found": [asdict(each) for each in differences],
    }  # fmt: skip
    seeds = ", ".join(map(str, options.seeds))
    arithmetic = f", {options.config.dtype}" if backend_kind(backend).uses_dtype else ""
    lines = [
        *map(_cell_line, results),
        *(_difference_line(each) for each in differences),
        f"sampling seeds {seeds}; seed of the grid {GRID_SEED}; {_preempted(results)}",
        f"identical {pairs - len(differences)}/{pairs} texts over {len(results)} cells, {tokens} tokens compared; "
        f"ties {ties}, differences {len(wrong)}",
        f"scope: backend {backend}{arithmetic}; the text is a function of weights, prompt, "
        "sampling parameters and seed" + (", up to numeric ties" if excusable else ""),
    ]
    return Report(ok=not wrong, data=data, lines=lines)


def _cell_line(each: CellResult) -> str:
    same = f"{each.num_prompts - len(each.differences)}/{each.num_prompts}"
    preempted = f", {each.preemptions} preemptions" if each.preemptions else ""
    return f"{_name(each.cell)}: identical {same}, acceptance length {each.acceptance_length:.2f}{preempted}"


def _preempted(results: list[CellResult]) -> str:
    """Returns a text with the number of preemptions, and of cells in which preemption was possible."""
    made = [result for result in results if result.cell["preemption"]]
    able = [each for each in made if min(each.cell["batch"], each.cell["chunk"], each.num_prompts) > 1]
    if not able:
        return "no cell in which sequences could preempt each other (two prompts or more, batches above 1)"
    hit = sum(result.preemptions > 0 for result in able)
    return f"{sum(result.preemptions for result in results)} preemptions, in {hit} of {len(able)} cells made for them"


def _difference_line(each: TokenDifference) -> str:
    margin = "" if each.margin is None else f", margin {each.margin:.2g}"
    what = f"{each.plain} and {each.other}{margin}" if each.plain >= 0 else "one text ends there"
    word = "tie" if each.tie else "DIFFERENT"
    return f"  {word}: prompt {each.prompt}, output token {each.position}: {what}, in {_name(each.cell)}"


def _name(cell: GridCell) -> str:
    switches = ", ".join(f"{name} {'on' if cell[name] else 'off'}" for name in ("cache", "preemption"))
    return (
        f"T {cell['temperature']:g}, {cell['drafter']} depth {cell['depth']}, batch {cell['batch']}, "
        f"chunk {cell['chunk']}, {switches}, threads {cell['threads']}, seed {cell['seed']}"
    )
