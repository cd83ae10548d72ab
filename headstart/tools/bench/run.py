"""`headstart bench`: runs every workload under every load in every mode, in alternating order."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count as count_up
from pathlib import Path
from typing import Any

from headstart.config import EngineConfig, config_fields
from headstart.core import Progress, Report, no_progress
from headstart.errors import CapacityError, HeadstartError, UsageError
from headstart.files import read_regular, write_atomic
from headstart.params import SamplingParams
from headstart.stats import synthetic_note
from headstart.tools.bench import measure, workloads
from headstart.tools.bench.document import KIND, BenchCell, BenchDocument, BenchRow, DraftCounts
from headstart.tools.bench.summary import checks, rows_of, table_lines
from headstart.tools.bench.workloads import Task, Workload
from headstart.tools.options import CHUNKED, BenchFlags

INTERRUPTED = "interrupted"
WARM_CACHE = 0.1  # share of cached prompt tokens above which TTFT no longer measures prefill
COLD = "start it with --no-enable-prefix-caching to measure prefill"
PASS_SECONDS = 10.0  # for all loads of a workload once; with the default modes and pairs a minute
LOADS: tuple[tuple[tuple[int, ...], int | None, int | None], ...] = (
    ((1, 4, 16), None, None), ((1, 4), 8, 64), ((1, 4), 8, 32), ((1, 4), 4, 32), ((1, 4), 4, 16), ((1,), 2, 16),
    ((1,), 1, 8),
)  # fmt: skip
"""Default loads for ever slower models: requests at a time, requests of a run, maximum tokens of an answer. None: two
requests for each client, at least MIN_REQUESTS; the workload's own maximum."""
MARKS = (KIND.encode(), b"<title>headstart bench:")  # identify a document and a report of ours


@dataclass(frozen=True, kw_only=True)
class BenchOptions(BenchFlags):
    config: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # checks it
        if self.requests is not None and self.requests < (together := max(self.concurrency, default=0)):
            hint = f"give --requests {together} or more, or a lower --concurrency"
            raise UsageError(f"--requests is {self.requests}, so {together} never run at a time", hint)
        if self.preset and self.preset not in workloads.PRESETS:
            raise UsageError(f"--preset is {self.preset!r}, which is unknown", f"known: {', '.join(workloads.PRESETS)}")
        exclusive = (
            ("--preset", self.preset, "--workload", self.workloads),
            ("--preset", self.preset, "--input-tokens", self.input_tokens),
            ("--workload", self.workloads, "--input-tokens", self.input_tokens),
            ("--concurrency", self.concurrency, "--request-rate", self.rates),
        )
        for first, one, second, other in exclusive:
            if one and other:
                raise UsageError(f"{first} and {second} are both given", "give one of them")
        if self.url is None and (self.off_url or self.api_key):
            raise UsageError("--off-url and --api-key are for servers", "give --url too")
        if self.url is not None and self.chunked_prefill != "on":
            raise UsageError("--chunked-prefill cannot be changed over HTTP", "start the server with or without it")
        self._check_names()
        for path in (self.out, self.report):
            if path is not None and path.exists():
                self._check_replaced(path)

    def _check_names(self) -> None:
        for mode in self.modes if self.url is None else ():
            measure.check_mode(mode)
        for name in self.workloads:
            workloads.find(name, len)

    def _check_replaced(self, path: Path) -> None:
        """Raises UsageError for an existing file without --force, or one that a bench did not write."""
        if not self.force:
            raise UsageError(f"{path} exists", "give another name, or --force to replace it")
        try:
            begin = read_regular(path)[:1000]
        except OSError:
            begin = b"no file"
        if begin and not any(mark in begin for mark in MARKS):
            raise UsageError(f"{path} was not written by headstart bench", "give another name")

    @property
    def loads(self) -> tuple[measure.RequestLoad, ...]:
        seed = self.config.seed or 0
        if self.rates:
            return tuple(measure.RequestLoad(rate=rate, seed=seed) for rate in self.rates)
        usual = workloads.PRESETS[self.preset].concurrency if self.preset else LOADS[0][0]
        counts = self.concurrency or [count for count in usual if count <= (self.requests or count)]
        return tuple(measure.RequestLoad(concurrency=count, seed=seed) for count in counts)

    @property
    def has_load(self) -> bool:
        """Whether an option says how many requests or tokens a run has."""
        given = (self.preset, self.concurrency, self.rates, self.requests, self.input_tokens, self.output_tokens)
        return any(given)

    @property
    def num_requests(self) -> int | None:
        return self.requests or (workloads.PRESETS[self.preset].requests if self.preset else None)


def run(options: BenchOptions, progress: Progress = no_progress) -> tuple[Report, BenchDocument]:
    """Measures all cells. Writes the document after each workload and load, and at the end, even after an error. `ok`:
    the run is complete and no request failed. Raises UsageError or ModelError before measuring."""
    document = BenchRun(options, progress).run()
    lines = table_lines(document)
    lines += [f"document  {options.out}"] if options.out else []
    lines += [f"report    {options.report}"] if options.report else []
    ok = document.complete and not any(cell.failed for cell in document.cells)
    return Report(ok=ok, data=document.json(), lines=lines), document


class BenchRun:
    def __init__(self, options: BenchOptions, progress: Progress) -> None:
        self.options, self._progress = options, progress
        tasks = workloads.read_tasks(options.prompts) if options.prompts else []
        progress(0, 1, "loading")
        self._targets = list(_targets(options, progress))
        self._modes = options.modes or self._targets[0].modes
        texts = tuple(turn for task in tasks for turn in task.turns)
        self._workloads = _workloads(options, self._targets[0].count_tokens, texts)
        self._meter = measure.EnergyMeter()
        self._cells: list[BenchCell] = []
        self._machine = _machine()
        self._created = datetime.now(UTC).isoformat(timespec="seconds")
        self._load_notes: tuple[str, ...] = ()

    def run(self) -> BenchDocument:
        self._warm_up()
        if not self.options.has_load:
            self._choose_load()
        try:
            error = self._measure()
        except KeyboardInterrupt:
            error = INTERRUPTED
        except HeadstartError as broken:
            error = str(broken)
        document = self._save(error)
        if self.options.report:
            from headstart.tools.bench.report import render

            _write(self.options.report, render(document))
        return document

    def _measure(self) -> str:
        """Measures all cells. Returns the reason if it ended early, else ""."""
        plan = list(self._plan())
        counts = [sum(len(task.turns) for task in self._tasks(workload, load)) for _, workload, load, _, _ in plan]
        total, done = sum(counts), 0
        for (target, workload, load, repeat, mode), count in zip(plan, counts, strict=True):
            if self._cells and repeat == 0 and mode == self._modes[0]:
                self._save("not finished yet")  # the file is current even if the program is killed
            numbers, text = count_up(done), f"{workload.name}, {load}, {mode}"

            def notify(numbers: Iterator[int] = numbers, text: str = text) -> None:
                self._progress(next(numbers), total, text)

            notify()
            cell = measure.measure(
                target, workload, mode, load,
                num_requests=self.options.num_requests, repeat=repeat, meter=self._meter, notify=notify,
            )  # fmt: skip
            self._cells.append(cell)
            done += count
            if error := _fatal_error(target, cell):
                return error
        return ""

    def _plan(self) -> Iterator[tuple[measure.BenchTarget, Workload, measure.RequestLoad, int, str]]:
        """Yields (target, workload, load, repeat, mode) of all cells. Every other repeat reverses the order of modes,
        so that drift of the machine cancels out."""
        for target in self._targets:
            for workload in self._workloads:
                for load in self.options.loads:
                    for repeat in range(self.options.pairs):
                        for mode in self._modes if repeat % 2 == 0 else self._modes[::-1]:
                            yield target, workload, load, repeat, mode

    def _tasks(self, workload: Workload, load: measure.RequestLoad) -> list[Task]:
        return workload.tasks(self.options.num_requests or measure.num_requests_for(load.concurrency), load.seed)

    def _warm_up(self) -> None:
        """Runs every mode once, so that unknown modes and tasks that do not fit fail before measuring."""
        for target in self._targets:
            for workload in self._workloads:
                target.check(max((self._tasks(workload, load) for load in self.options.loads), key=len))
            for mode in self._modes:
                self._progress(0, 1, f"warming up, {mode}")
                measure.warm_up(target, self._workloads[0], mode)

    def _choose_load(self) -> None:
        """Takes the first of LOADS that is estimated to need at most PASS_SECONDS, else the last."""
        alone = measure.run_alone(self._targets[0], self._workloads[0], self._modes[0])
        for concurrency, requests, tokens in LOADS:
            counts = [requests or measure.num_requests_for(each) for each in concurrency]
            longest = tokens or workloads.DEFAULT_TOKENS
            runs = list(zip(counts, concurrency, strict=True))
            if sum(alone.estimate_seconds(count, longest, each) for count, each in runs) <= PASS_SECONDS:
                break
        self.options = replace(self.options, concurrency=concurrency, requests=requests, output_tokens=tokens)
        self._workloads = [each.limited(tokens) for each in self._workloads]
        described = ", ".join(f"{count} with {each} at a time" for count, each in runs)
        self._load_notes = (
            f"requests of a run: {described}, answers of at most {longest} tokens, as one request alone has "
            f"{alone.tokens_per_s:.3g} tokens/s; --concurrency, --requests and --output-tokens set another load",
        )

    def _save(self, error: str) -> BenchDocument:
        """Builds the document of all cells so far and writes it to --out; with an error it counts as incomplete."""
        rows = rows_of(self._cells, price_per_hour=self.options.price_per_hour)
        source = dict(self._targets[0].description)
        document = BenchDocument(
            created=self._created, source=source, machine=self._machine,
            settings=_settings(self.options, self._modes, self._workloads), complete=not error, error=error,
            notes=(*self._load_notes, *_notes(self.options, source, rows, self._cells)), rows=tuple(rows),
            checks=tuple(checks(self._cells)), cells=tuple(self._cells),
        )  # fmt: skip
        if self.options.out:
            _write(self.options.out, json.dumps(document.json(), ensure_ascii=False, indent=1) + "\n")
        return document


def _targets(options: BenchOptions, progress: Progress) -> Iterator[measure.BenchTarget]:
    if options.url is not None:
        from headstart.tools.bench.http import HttpTarget
        from headstart.tools.client import Server

        off = Server.at(options.off_url, options.api_key) if options.off_url else None
        yield HttpTarget(Server.at(options.url, options.api_key), off, model=options.model)
        return
    from headstart.tools.bench.inprocess import InProcessTarget

    most = max((load.concurrency or 0 for load in options.loads), default=0)
    config = replace(options.config, max_num_seqs=max(options.config.max_num_seqs, most))
    model: Any = options.model
    for chunked in CHUNKED[options.chunked_prefill]:
        target = InProcessTarget(model, config, chunked_prefill=chunked, progress=progress)
        model, config = target.model, replace(config, kv_blocks=target.kv_blocks)  # the same for all
        yield target


def _workloads(options: BenchOptions, count_tokens: Callable[[str], int], texts: tuple[str, ...]) -> list[Workload]:
    if options.preset or options.input_tokens:
        preset = workloads.PRESETS.get(options.preset or "")
        tokens = options.input_tokens or (preset.input_tokens if preset else 0)
        answers = options.output_tokens or (preset.output_tokens if preset else workloads.DEFAULT_TOKENS)
        tokens, answers = (max(1, round(options.scale * each)) for each in (tokens, answers))
        chosen = [workloads.synthetic(tokens, count_tokens, texts, options.preset or "").limited(answers, exactly=True)]
    else:
        named = [workloads.find(name, count_tokens, texts) for name in options.workloads or ("mixed",)]
        chosen = [each.limited(options.output_tokens) for group in named for each in group]
    if options.temperatures:
        chosen = [each.at(temperature) for each in chosen for temperature in options.temperatures]
    return chosen


def _fatal_error(target: measure.BenchTarget, cell: BenchCell) -> str:
    """Returns the reason to stop after a cell: the server died, or all requests failed; else ""."""
    if cell.failed and not cell.complete and not target.is_alive():
        return f"the server died: {cell.errors[0]}"
    if cell.requests and cell.failed == cell.requests:
        return f"all {cell.requests} requests of a run failed: {cell.errors[0]}"
    return ""


def _notes(
    options: BenchOptions, source: Mapping[str, Any], rows: list[BenchRow], cells: list[BenchCell]
) -> Iterator[str]:
    """Yields notes that readers need to interpret the numbers."""
    if rates := source.get("synthetic_acceptance"):
        yield synthetic_note(rates)
    if options.price_per_hour is None:
        yield "no cost: give the machine's price with --price-per-hour"
    if cells and all(cell.joules is None for cell in cells):
        yield "no energy: this machine has no readable energy counter"
    drafted = DraftCounts.total(cell.speculation for cell in cells if cell.speculation)
    if drafted and drafted.sources:
        yield "accepted tokens by drafter: " + ", ".join(f"{name} {count}" for name, count in drafted.sources.items())
    cached = max((row.cached_share or 0.0 for row in rows), default=0.0)
    if options.url is not None and cached > WARM_CACHE:
        yield f"up to {cached:.0%} of the prompt tokens came from the server's prefix cache: {COLD}"
    if failed := sum(cell.failed for cell in cells):
        yield f"{failed} of {sum(cell.requests for cell in cells)} requests failed; they count in no rate or time"


def _machine() -> Mapping[str, Any]:
    from headstart import machine
    from headstart.tools import doctor
    from headstart.version import __version__

    gpus = doctor.gpus()
    return {"cpu": machine.cpu().model, "threads": machine.threads().usable, "gpu": gpus, "headstart": __version__}


def _settings(options: BenchOptions, modes: tuple[str, ...], chosen: list[Workload]) -> dict[str, Any]:
    """Returns the options for the document, without the API key and without options that `source` contains."""
    named = ("pairs", "input_tokens", "output_tokens", "preset", "scale", "price_per_hour")
    engine = {name: getattr(options.config, name) for name, item in config_fields().items()}
    return {
        "workloads": [workload.name for workload in chosen], "loads": list(map(str, options.loads)),
        "modes": list(modes), **{name: getattr(options, name) for name in named}, "requests": options.num_requests,
        "temperatures": list(options.temperatures), "seed": options.config.seed or 0,
        "engine": {name: value for name, value in engine.items() if value != config_fields()[name].default},
    }  # fmt: skip


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise CapacityError(f"cannot write {path}: {error.strerror}", "is there room, and may you write?") from None
