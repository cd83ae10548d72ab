"""`headstart adapt`: trains the head in use on recorded texts of the user's server, and saves it if it is better.

Intermediate files are stored beside the adapted heads, in a folder that only the owner can read. An interrupted run
continues from them; a completed run removes them.
"""

import json
import shutil
import time
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.config import EngineConfig, one_adapter
from headstart.core import Progress, Report, SamplingParams, no_progress
from headstart.engine.load import NATIVE_HEAD, Model, load_model
from headstart.errors import CapacityError, UsageError
from headstart.files import write_atomic
from headstart.formats.adapter import digest_of
from headstart.heads.kind import head_kind, trained_kinds
from headstart.server.records import RecordedModel, TextRecord, read_manifest, read_records
from headstart.tools import saved
from headstart.tools.adapt import evaluation
from headstart.tools.options import AdaptFlags
from headstart.tools.prompts import builtin_prompts
from headstart.train import self_distillation
from headstart.train.options import TrainOptions
from headstart.train.progress import print_line
from headstart.train.prompts import templated_prompts
from headstart.train.records import MAX_TOKENS
from headstart.train.run import run as train

MIN_TEXTS = 16  # least number of texts for training
GENERAL_SHARE, MEASURING_SHARE = 0.1, 0.15  # shares of the time: general text (against forgetting), measuring
GENERAL_TOKENS, MIN_GENERAL_TOKENS = 0.25, 4096  # size of the general text: share of the records' tokens, minimum
TOKENS_PER_MINUTE = 100_000  # limit of the records' tokens per minute of the run; older records are left out
VALIDATION_EVERY = 20  # one text in this many is for validation, which selects the best state of the training
CONTEXT = MAX_TOKENS // 4  # tokens before each piece of a long text
MAX_HELD_OUT, GENERAL_PROMPTS, GENERAL_SEED, GENERAL_ANSWER = 256, 24, 77, 64
LEARNED_SHARE = 0.6
"""Position of the saved weights between the head in use (0) and the trained one (1): an interpolated head drafts the
user's texts equally well, and other texts better (Wortsman 2022; docs/log)."""
INTERRUPTED = (
    "the head in use is unchanged; the same command continues, headstart adapt --forget removes the unfinished head"
)
MORE_TOKENS = 1024  # tokens that adapting may add to a draft vocabulary


@dataclass(frozen=True, kw_only=True)
class AdaptOptions(AdaptFlags):
    records: Path

    @property
    def config(self) -> EngineConfig:
        """Options of the engines that measure and write text."""
        return EngineConfig(threads=self.threads, seed=0, lora=one_adapter(self.lora))


def run(options: AdaptOptions, progress: Progress = no_progress) -> Report:
    """Trains, measures, and saves the better head. Raises UsageError for records of another model, too few records, or
    a head that cannot be trained; CapacityError if files cannot be written."""
    read_manifest(options.records)  # fails early, before the model is loaded
    begun = time.monotonic()
    start = _start(options)
    RecordedModel.of(start.model).check(options.records)
    found = read_records(options.records, start.model.config.vocab_size, start.adapter)
    parts = evaluation.split_records(_newest(found.records, int(options.minutes * TOKENS_PER_MINUTE)))
    if len(parts.training) < MIN_TEXTS or len(parts.held_out) < evaluation.MIN_REQUESTS:
        raise UsageError(
            f"{options.records} has {len(parts.training)} texts for training and {len(parts.held_out)} for evaluation; "
            f"{MIN_TEXTS} and {evaluation.MIN_REQUESTS} are needed",
            "let headstart serve --record run for longer, with more kinds of prompts",
        )
    tokens = sum(len(each.response_ids) for each in parts.training)
    line = f"{len(parts.training)} texts for training ({tokens:,} tokens), {len(parts.held_out)} held out"
    line += f"; {parts.num_similar} left out, since they resemble held-out ones" if parts.num_similar else ""
    line += f"; {found.damaged} damaged lines" if found.damaged else ""
    print_line(line)
    run = _AdaptRun(options, start, parts, begun, progress)
    try:
        return run.report(line, found.damaged)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(INTERRUPTED) from None


@dataclass(frozen=True)
class _StartingHead:
    """The model with the head in use."""

    model: Model
    path: Path | None  # folder of the head; None: inside the checkpoint
    base: str  # AdaptedHead.base
    adapter: str = ""  # digest of the LoRA adapter that the head drafts for

    @property
    def kind(self) -> str:
        assert self.model.head is not None
        return self.model.head.spec.kind


def _start(options: AdaptOptions) -> _StartingHead:
    head = str(options.head) if options.head else None
    config = replace(options.config, drafter=options.kind or "auto", head=head)
    adapter = digest_of(options.lora) if options.lora else ""
    kept = saved.find_adapted_head(options.model, config)
    model = load_model(options.model, replace(config, head=str(kept[0])) if kept else config)
    if model.head is None:
        raise UsageError(f"{model.name} has no head to adapt", "give --head, or make one: headstart train --help")
    kind = model.head.spec.kind
    if options.kind not in (None, kind):
        raise UsageError(f"{model.name} has no head of kind {options.kind}, but one of kind {kind}", "give --head")
    if head_kind(kind).training is None:
        raise UsageError(f"a head of kind {kind} cannot be trained", f"those can: {', '.join(trained_kinds())}")
    path = None if model.head.source == NATIVE_HEAD else Path(model.head.source)
    base = saved.digest_of(path) if path and path.parent == hub.HEADS else ""
    return _StartingHead(model, path, kept[1].base if kept else base, adapter)


def _newest(records: Seq[TextRecord], limit: int) -> list[TextRecord]:
    """Returns the newest records, with at most `limit` tokens together, but at least one."""
    tokens = accumulate(len(each.prompt_ids) + len(each.response_ids) for each in reversed(records))
    return list(records[-max(sum(total <= limit for total in tokens), 1) :])


class _AdaptRun:
    def __init__(
        self, options: AdaptOptions, start: _StartingHead, parts: evaluation.RecordSplit, begun: float,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.options, self.start, self.parts, self._begun, self._progress = options, start, parts, begun, progress
        self.folder = saved.folder_of(options.model, start.adapter) / start.kind
        self.work = self.folder.with_name(self.folder.name + saved.WORK)
        self.head = self.work / "head"
        self._config = options.config
        try:
            self._open()
        except OSError as error:
            hint = "HEADSTART_CACHE names another folder"
            raise CapacityError(f"cannot write {self.work}: {error.strerror or error}", hint) from None

    def _open(self) -> None:
        """Creates the work folder, or continues in that of an interrupted run from the same head and seed."""
        start = saved.digest_of(self.start.path) if self.start.path else NATIVE_HEAD
        plan = {"start": start, "seed": self.options.seed}
        path = self.work / "plan.json"
        if not path.exists() or json.loads(path.read_text()) != plan:
            shutil.rmtree(self.work, ignore_errors=True)
        elif (self.work / "head.training" / "checkpoint.pt").exists():
            print_line("going on where the last run was interrupted")
        self.work.mkdir(parents=True, exist_ok=True)
        self.work.parent.chmod(0o700)
        write_atomic(path, json.dumps(plan))
        write_atomic(self.work / "records.jsonl", "".join(_lines(self.parts.training)))

    def report(self, line: str, damaged: int) -> Report:
        """Trains, compares, and saves the new head if it is better. `line`: text about the records in use."""
        self._train([self.work / "records.jsonl", *self._write_general_text()])
        own, others = self._compare()
        better = own.is_better
        if better:
            (before, after), date = own.lengths, time.strftime("%Y-%m-%d")
            facts = saved.AdaptedHead(kind=self.start.kind, date=date, base=self.start.base, before=before, after=after)
            saved.save_head(self.folder, self.head, facts)
        shutil.rmtree(self.work, ignore_errors=True)
        minutes = (time.monotonic() - self._begun) / 60
        data = {
            "adapted": better,
            "kind": self.start.kind,
            "path": str(self.folder) if better else None,
            "held_out": own.data(),
            "general": others.data(),
            "texts": {"training": len(self.parts.training), "held_out": len(self.parts.held_out),
                      "left_out": self.parts.num_similar, "damaged_lines": damaged},
            "minutes": round(minutes, 1),
        }  # fmt: skip
        lora = f" with --lora {self.options.lora} alone" if self.options.lora else ""
        verdict = (
            f"saved in {self.folder}: generate, chat and serve{lora} use it from now on, "
            "a running server after kill -HUP PID"
            if better
            else "not significantly better: the head in use stays; more records or more --minutes may help"
        )
        return Report(True, data, [line, own.line("held-out records"), others.line("general prompts"), verdict])

    def _write_general_text(self) -> list[Path]:
        """Lets the model answer general prompts. Returns [folder of the texts], or [] without usable text."""
        tokens = sum(len(each.response_ids) for each in self.parts.training)
        wanted = self_distillation.DataOptions(
            model=self.options.model, config=self._config, out=self.work / "general",
            tokens=max(MIN_GENERAL_TOKENS, int(GENERAL_TOKENS * tokens)), minutes=GENERAL_SHARE * self.options.minutes,
            seed=self.options.seed,
        )  # fmt: skip
        written = self_distillation.run(wanted, self._progress)
        return [wanted.out] if written.ok else []

    def _train(self, data: Seq[Path]) -> None:
        head = self.start.model.head
        assert head is not None
        kind = head_kind(head.spec.kind).training
        assert kind is not None
        # a block drafter trains all its rows; other heads the kind's draft steps, within the head's modules
        depth = head.spec.depth_limit if head.spec.block else min(kind.depth, head.spec.depth_limit)
        known, spent = head.draft_token_ids, (time.monotonic() - self._begun) / 60
        training = TrainOptions(
            model=self.start.model.name, out=self.head, kind=self.start.kind, finetune=True, head=self.start.path,
            data=tuple(data),
            minutes=max(self.options.minutes * (1 - MEASURING_SHARE) - spent, 0.1 * self.options.minutes),
            draft_vocab=MORE_TOKENS + (TrainOptions.draft_vocab if known is None else len(known)), depth=depth,
            threads=self.options.threads, seed=self.options.seed, measure_speedup=False, update_share=LEARNED_SHARE,
            lora=self.options.lora,
        )  # fmt: skip
        train(training, self._progress)

    def _compare(self) -> tuple[evaluation.HeadComparison, evaluation.HeadComparison]:
        pair = evaluation.HeadPair(self.start.model, self._config, self.head)
        own = [evaluation.EvalPrompt.of(each) for each in self.parts.held_out[-MAX_HELD_OUT:]]
        drawn = templated_prompts(GENERAL_SEED, GENERAL_PROMPTS, [], [])
        prompts = [*(prompt for _, prompt in builtin_prompts()), *(each.prompt for each in drawn)][:GENERAL_PROMPTS]
        params = SamplingParams(max_tokens=GENERAL_ANSWER, seed=0)
        general = [evaluation.EvalPrompt(pair.encode(prompt), params) for prompt in prompts]
        end = max(self._begun + 60 * self.options.minutes, time.monotonic())

        def should_continue(count: int) -> bool:
            self._progress(count, len(own), "measuring on held-out requests")
            return time.monotonic() < end

        return pair.compare(own, should_continue), pair.compare(general)


def _lines(records: Seq[TextRecord]) -> Iterator[str]:
    """Yields JSON lines for training. Long texts are split; each piece has up to CONTEXT tokens of the text before."""
    for record in records:
        ids, end = (*record.prompt_ids, *record.response_ids), len(record.prompt_ids)
        while end < len(ids):
            first = end
            end = min(first + MAX_TOKENS - CONTEXT, len(ids))
            document: dict[str, Any] = {
                "kind": "records", "prompt_ids": ids[max(0, end - MAX_TOKENS) : first], "response_ids": ids[first:end],
                "held_out": evaluation.record_seed(record) % VALIDATION_EVERY == 0,
            }  # fmt: skip
            yield json.dumps(document) + "\n"
