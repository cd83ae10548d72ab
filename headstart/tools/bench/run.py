"""The whole bench: every workload under every load in every mode, in alternating order, and what it comes to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count as count_up
from pathlib import Path
from typing import Any

from headstart.config import EngineConfig, config_fields
from headstart.core import Progress, Report, no_progress
from headstart.errors import CapacityError, HeadstartError, UsageError
from headstart.files import read_regular, write_whole
from headstart.stats import synthetic_note
from headstart.tools.bench import workloads
from headstart.tools.bench.document import Cell, Document, Row
from headstart.tools.bench.energy import EnergyMeter
from headstart.tools.bench.measure import Load, System, measure, requests_for, warm_up
from headstart.tools.bench.statistics import checks
from headstart.tools.bench.summary import rows_of, table_lines
from headstart.tools.bench.workloads import Task, Workload

INTERRUPTED = "interrupted"
WARM_CACHE = 0.1
"""Above this share of prompt tokens from the prefix cache, times to first token say little about prefill."""


MOST_REQUESTS, MOST_TOKENS, MOST_SCALE = 1_000_000, 2**24, 1000
"""Larger numbers are slips, and would fill the memory before anything is measured."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure. `url` None: in this process. Empty tuples stand for defaults: modes off and auto (or what a
    server does), concurrency 1, 4 and 16. `requests` None: measure.requests_for. `chunked_prefill`: each of these, in
    process only. `prompts`: texts that synthetic prompts are made of."""

    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    url: str | None = None
    off_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    preset: str | None = None
    scale: float = 1.0
    workloads: tuple[str, ...] = ()
    prompts: Path | None = None
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    requests: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    temperatures: tuple[float, ...] = ()
    modes: tuple[str, ...] = ()
    pairs: int = 3
    chunked_prefill: tuple[bool, ...] = (True,)
    price_per_hour: float | None = None
    out: Path | None = None
    report: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for options that contradict each other, or are too large to mean anything."""
        self._check_numbers()
        if self.preset and self.preset not in workloads.PRESETS:
            raise UsageError(f"--preset is {self.preset!r}, which is unknown", f"known: {', '.join(workloads.PRESETS)}")
        for flag, given in (("--workload", self.workloads), ("--input-tokens", self.input_tokens)):
            if self.preset and given:
                raise UsageError(f"--preset and {flag} are both given", "the preset says what is asked")
        if self.workloads and self.input_tokens:
            raise UsageError("--workload and --input-tokens are both given", "--input-tokens makes prompts of its own")
        if self.concurrency and self.rates:
            raise UsageError("--concurrency and --request-rate are both given", "give one of them")
        if self.url is None and (self.off_url or self.api_key):
            raise UsageError("--off-url and --api-key are for servers", "give --url too")
        if self.url is not None and self.chunked_prefill != (True,):
            raise UsageError("--chunked-prefill cannot be changed over HTTP", "start the server with or without it")
        for path in (self.out, self.report):
            if path is not None and path.exists():
                _check_replaced(path, self.force)

    def _check_numbers(self) -> None:
        most = {
            "--requests": (self.requests, MOST_REQUESTS),
            "--pairs": (self.pairs, MOST_REQUESTS),
            "--concurrency": (max(self.concurrency, default=0), MOST_REQUESTS),
            "--input-tokens": (self.input_tokens, MOST_TOKENS),
            "--output-tokens": (self.output_tokens, MOST_TOKENS),
            "--scale": (self.scale, MOST_SCALE),
        }
        for flag, (value, limit) in most.items():
            if value is not None and value > limit:
                raise UsageError(f"{flag} is {value:g}, but must be at most {limit:,}")
        if self.requests is not None and self.requests < (together := max(self.concurrency, default=0)):
            hint = f"give --requests {together} or more, or a lower --concurrency"
            raise UsageError(f"--requests is {self.requests}, so {together} never run at a time", hint)

    @property
    def loads(self) -> tuple[Load, ...]:
        seed = self.config.seed or 0
        if self.rates:
            return tuple(Load(rate=rate, seed=seed) for rate in self.rates)
        usual = workloads.PRESETS[self.preset].concurrency if self.preset else (1, 4, 16)
        counts = self.concurrency or [count for count in usual if count <= (self.requests or count)]
        return tuple(Load(concurrency=count, seed=seed) for count in counts)

    @property
    def num_requests(self) -> int | None:
        return self.requests or (workloads.PRESETS[self.preset].requests if self.preset else None)


def run(options: BenchOptions, progress: Progress = no_progress) -> tuple[Report, Document]:
    """Measure everything; the report's data are the document's. What was found is written as each workload and load is
    done, and at the end, however that comes. `ok` is false when the run broke off or requests failed. Raises UsageError
    and ModelError before anything is measured."""
    bench = Bench(options, progress)
    document = bench.run()
    lines = table_lines(document)
    if options.out:
        lines.append(f"document  {options.out}")
    if options.report:
        lines.append(f"report    {options.report}")
    ok = document.complete and not any(cell.failed for cell in document.cells)
    return Report(ok=ok, data=document.json(), lines=lines), document


class Bench:
    """A run in progress."""

    def __init__(self, options: BenchOptions, progress: Progress) -> None:
        self.options, self._progress = options, progress
        texts = _texts(options.prompts)  # wrong files are found before a model is loaded
        for name in options.workloads:
            workloads.find(name, len)
        progress(0, 1, "loading")
        self._runners = list(_runners(options, progress))
        self._modes = options.modes or self._runners[0].modes
        self._workloads = _workloads(options, self._runners[0].count_tokens, texts)
        self._meter = EnergyMeter()
        self._cells: list[Cell] = []
        self._machine = _machine()
        self._created = datetime.now(UTC).isoformat(timespec="seconds")

    def run(self) -> Document:
        self._warm_up()
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
        """All cells; why it ended early, or nothing."""
        plan = list(self._plan())
        counts = [sum(len(task.turns) for task in self._tasks(workload, load)) for _, workload, load, _, _ in plan]
        total, done = sum(counts), 0
        for (runner, workload, load, repeat, mode), count in zip(plan, counts, strict=True):
            if self._cells and repeat == 0 and mode == self._modes[0]:
                self._save("not finished yet")  # whatever may end the program
            notify = partial(self._answered, count_up(done), total, f"{workload.name}, {_shown(load)}, {mode}")
            notify()
            cell = measure(
                runner, workload, mode, load,
                num_requests=self.options.num_requests, repeat=repeat, meter=self._meter, notify=notify,
            )  # fmt: skip
            self._cells.append(cell)
            done += count
            if error := _fatal(runner, cell):
                return error
        return ""

    def _answered(self, numbers: Iterator[int], total: int, text: str) -> None:
        self._progress(next(numbers), total, text)

    def _plan(self) -> Iterator[tuple[System, Workload, Load, int, str]]:
        """Every other repeat has its modes the other way round, so that drift of the machine cancels out."""
        for runner in self._runners:
            for workload in self._workloads:
                for load in self.options.loads:
                    for repeat in range(self.options.pairs):
                        for mode in self._modes if repeat % 2 == 0 else self._modes[::-1]:
                            yield runner, workload, load, repeat, mode

    def _tasks(self, workload: Workload, load: Load) -> list[Task]:
        return workload.tasks(self.options.num_requests or requests_for(load.concurrency), load.seed)

    def _warm_up(self) -> None:
        """Every mode once. Modes that do not exist and tasks that do not fit are found before anything is measured."""
        for runner in self._runners:
            for workload in self._workloads:
                runner.check(max((self._tasks(workload, load) for load in self.options.loads), key=len))
            for mode in self._modes:
                self._progress(0, 1, f"warming up, {mode}")
                warm_up(runner, self._workloads[0], mode)

    def _save(self, error: str) -> Document:
        """Everything so far; with an error it is marked as incomplete."""
        rows = rows_of(self._cells, price_per_hour=self.options.price_per_hour)
        source = dict(self._runners[0].about)
        document = Document(
            created=self._created,
            source=source,
            machine=self._machine,
            settings=_settings(self.options, self._modes, self._workloads),
            complete=not error,
            error=error,
            notes=tuple(_notes(self.options, source, rows, self._cells)),
            rows=tuple(rows),
            checks=tuple(checks(self._cells)),
            cells=tuple(self._cells),
        )
        if self.options.out:
            _write(self.options.out, json.dumps(document.json(), ensure_ascii=False, indent=1) + "\n")
        return document


def _shown(load: Load) -> str:
    return f"{load.concurrency} at a time" if load.rate is None else f"{load.rate:g} per second"


def _runners(options: BenchOptions, progress: Progress) -> Iterator[System]:
    if options.url is not None:
        from headstart.tools.bench.http import OverHttp
        from headstart.tools.client import Server

        off = Server.at(options.off_url, options.api_key) if options.off_url else None
        yield OverHttp(Server.at(options.url, options.api_key), off, model=options.model)
        return
    from headstart.tools.bench.inprocess import InProcess

    most = max((load.concurrency or 0 for load in options.loads), default=0)
    config = replace(options.config, max_num_seqs=max(options.config.max_num_seqs, most))
    model: Any = options.model
    for chunked in options.chunked_prefill:
        runner = InProcess(model, config, chunked_prefill=chunked, progress=progress)
        model, config = runner.model, replace(config, kv_blocks=runner.kv_blocks)  # the same for all
        yield runner


def _workloads(options: BenchOptions, count_tokens: Callable[[str], int], texts: tuple[str, ...]) -> list[Workload]:
    """Raises UsageError."""
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


def _texts(path: Path | None) -> tuple[str, ...]:
    return tuple(turn for task in workloads.read_tasks(path) for turn in task.turns) if path else ()


def _fatal(runner: System, cell: Cell) -> str:
    """Why it makes no sense to go on after a cell: the server has gone, or takes none of the requests."""
    if cell.failed and not cell.complete and not runner.is_alive():
        return f"the server died: {cell.errors[0]}"
    if cell.requests and cell.failed == cell.requests:
        return f"all {cell.requests} requests of a run failed: {cell.errors[0]}"
    return ""


def _notes(options: BenchOptions, source: Mapping[str, Any], rows: list[Row], cells: list[Cell]) -> Iterator[str]:
    """What a reader has to know to read the numbers rightly."""
    if rates := source.get("synthetic_acceptance"):
        yield synthetic_note(rates)
    if options.price_per_hour is None:
        yield "no cost: --price-per-hour says what the machine costs"
    if cells and all(cell.joules is None for cell in cells):
        yield "no energy: this machine does not tell what it takes"
    cached = max((row.cached_share or 0.0 for row in rows), default=0.0)
    if options.url is not None and cached > WARM_CACHE:
        yield (
            f"up to {cached:.0%} of the prompt tokens came from the server's prefix cache: start it with "
            "--no-enable-prefix-caching to measure prefill"
        )
    if failed := sum(cell.failed for cell in cells):
        yield f"{failed} of {sum(cell.requests for cell in cells)} requests failed; they count in no rate or time"


def _machine() -> Mapping[str, Any]:
    from headstart import __version__, machine
    from headstart.tools import doctor

    return {
        "cpu": machine.cpu().model,
        "threads": machine.threads().usable,
        "gpu": doctor.gpus(),
        "headstart": __version__,
    }


def _settings(options: BenchOptions, modes: tuple[str, ...], chosen: list[Workload]) -> dict[str, Any]:
    """Without the API key, and without what the source tells."""
    return {
        "workloads": [workload.name for workload in chosen],
        "loads": [_shown(load) for load in options.loads],
        "modes": list(modes),
        "pairs": options.pairs,
        "requests": options.num_requests,
        "input_tokens": options.input_tokens,
        "output_tokens": options.output_tokens,
        "temperatures": list(options.temperatures),
        "preset": options.preset,
        "scale": options.scale,
        "seed": options.config.seed or 0,
        "price_per_hour": options.price_per_hour,
        "engine": {
            name: value
            for name, item in config_fields().items()
            if (value := getattr(options.config, name)) != item.default
        },
    }


MARKS = (b"headstart-bench", b"<title>headstart bench:")
"""In the first bytes of a document and of a report."""


def _check_replaced(path: Path, force: bool) -> None:
    """Raises UsageError for what is not to be replaced, or was not written by a bench."""
    if not force:
        raise UsageError(f"{path} exists", "give another name, or --force to replace it")
    try:
        begin = read_regular(path)[:1000]
    except OSError:
        begin = b"no file"
    if begin and not any(mark in begin for mark in MARKS):
        raise UsageError(f"{path} was not written by headstart bench", "give another name")


def _write(path: Path, text: str) -> None:
    """Raises CapacityError."""
    try:
        write_whole(path, text)
    except OSError as error:
        hint = "is there room, and may you write?"
        raise CapacityError(f"cannot write {path}: {error.strerror}", hint) from None
