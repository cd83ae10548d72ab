"""`headstart adapt`: the head in use learns from what the user's own server has written, and stays if that helps.

What is made on the way lies beside the adapted heads, in a folder of the owner's alone; an interrupted run goes on from
there, and a run that ends removes it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.config import EngineConfig
from headstart.core import Report, SamplingParams
from headstart.engine.attach import NATIVE_HEAD
from headstart.engine.load import Model, load_model
from headstart.errors import CapacityError, UsageError
from headstart.files import write_whole
from headstart.heads.base import HeadSpec
from headstart.heads.kind import head_kind, trained_kinds
from headstart.server.records import Record, RecordedModel, read_manifest, read_records
from headstart.tools.adapt.kept import WORK, Adapted, digest_of, folder_of, keep, kept_head
from headstart.tools.adapt.measure import FEWEST, Asked, Comparison, Pair
from headstart.tools.adapt.split import Split, seed_of, split
from headstart.tools.prompts import builtin_prompts
from headstart.train import own_data
from headstart.train.data import MAX_TOKENS
from headstart.train.progress import note, shown
from headstart.train.prompts import templated_prompts
from headstart.train.run import TrainOptions, run as train

FEWEST_TEXTS = 16
"""To learn from; fewer tell nothing."""
GENERAL_SHARE, MEASURING_SHARE = 0.1, 0.15
"""Of the time: for text that the model writes to other prompts, so that the head does not forget; for measuring."""
GENERAL_TOKENS, FEWEST_GENERAL = 0.25, 4096
"""That text, as a share of the records', and at least."""
TOKENS_PER_MINUTE = 100_000
"""No machine learns from more: older records are left out."""
JUDGED_EVERY = 20
"""One text in so many tells the training which of its heads is the best."""
CONTEXT = MAX_TOKENS // 4
"""Tokens before each piece of a long text."""
MOST_HELD_OUT, GENERAL_PROMPTS, GENERAL_SEED = 256, 24, 77
GENERAL_ANSWER = 64
LEARNED = 0.6
"""How far the weights go from the head in use to the one that has learned: between them lies one that drafts your texts
as well and others better (Wortsman 2022; docs/LOG.md)."""
GOES_ON = (
    "the head in use is as it was; the same command goes on from here, headstart adapt --forget removes what is left"
)
MORE_TOKENS = 1024
"""That a draft vocabulary may take up beside those that it has."""


@dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """`head` None: the one in use. `kind`: of it, where the model has several. `minutes`: of the whole run."""

    records: Path
    model: str | None = None
    head: Path | None = None
    kind: str | None = None
    minutes: float = 30.0
    threads: int | None = None
    seed: int = 0


def run(options: AdaptOptions) -> Report:
    """Learn, measure, and keep the better head. Raises UsageError for records of another model, too few of them, or a
    head that cannot be trained; CapacityError where nothing can be written."""
    read_manifest(options.records)  # before a model is loaded for nothing
    begun = time.monotonic()
    start = _start(options)
    RecordedModel.of(start.model).check(options.records)
    found = read_records(options.records, start.model.config.vocab_size)
    parts = split(_newest(found.records, int(options.minutes * TOKENS_PER_MINUTE)))
    if len(parts.training) < FEWEST_TEXTS or len(parts.held_out) < FEWEST:
        raise UsageError(
            f"{options.records} holds {len(parts.training)} texts to learn from, and {len(parts.held_out)} to be "
            f"judged by; {FEWEST_TEXTS} and {FEWEST} are needed",
            "let headstart serve --record run for longer, with prompts of more kinds",
        )
    lines = _what(parts, found.damaged)
    for line in lines:
        note(line)
    run = _Run(options, start, parts, begun)
    try:
        return run.report(lines, found.damaged)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(GOES_ON) from None


@dataclass(frozen=True)
class _Start:
    """The model with the head in use; `path`: that head's folder, None inside the checkpoint; `base`: see Adapted."""

    model: Model
    path: Path | None
    base: str

    @property
    def kind(self) -> str:
        assert self.model.head is not None
        return self.model.head.spec.kind


def _start(options: AdaptOptions) -> _Start:
    head = str(options.head) if options.head else None
    config = EngineConfig(threads=options.threads, seed=0, drafter=options.kind or "auto", head=head)
    kept = kept_head(options.model, config)
    head = str(kept[0]) if kept else head
    model = load_model(options.model, EngineConfig(threads=options.threads, seed=0, drafter=config.drafter, head=head))
    if model.head is None:
        raise UsageError(f"{model.name} has no head to adapt", "give --head, or make one: headstart train --help")
    kind = model.head.spec.kind
    if options.kind not in (None, kind):
        raise UsageError(f"{model.name} has no head of kind {options.kind}, but one of kind {kind}", "give --head")
    if head_kind(kind).training is None:
        raise UsageError(f"a head of kind {kind} cannot be trained", f"those can: {', '.join(trained_kinds())}")
    path = None if model.head.source == NATIVE_HEAD else Path(model.head.source)
    shipped = hub.shipped_heads(model.name).get(kind)
    return _Start(model, path, kept[1].base if kept else digest_of(path) if path and path == shipped else "")


def _newest(records: Seq[Record], most: int) -> list[Record]:
    """The last ones, of at most so many tokens."""
    taken: list[Record] = []
    for record in reversed(records):
        most -= len(record.prompt_ids) + len(record.response_ids)
        if most < 0 and taken:
            break
        taken.append(record)
    return taken[::-1]


def _what(parts: Split, damaged: int) -> list[str]:
    tokens = sum(len(each.response_ids) for each in parts.training)
    line = f"{len(parts.training)} texts to learn from ({tokens:,} tokens), {len(parts.held_out)} held out"
    left_out = f"{parts.alike} left out, for they resemble those held out" if parts.alike else ""
    broken = f"{damaged} damaged lines" if damaged else ""
    return ["; ".join(each for each in (line, left_out, broken) if each)]


class _Run:
    """One run and its folder."""

    def __init__(self, options: AdaptOptions, start: _Start, parts: Split, begun: float) -> None:
        self.options, self.start, self.parts, self._begun = options, start, parts, begun
        self.kept = folder_of(options.model) / start.kind
        self.work = self.kept.with_name(self.kept.name + WORK)
        self.head = self.work / "head"
        self._config = EngineConfig(threads=options.threads, seed=0)
        try:
            self._open()
        except OSError as error:
            hint = "HEADSTART_CACHE names another folder"
            raise CapacityError(f"cannot write {self.work}: {error.strerror or error}", hint) from None

    def _open(self) -> None:
        """The folder, with what an earlier run from the same head has left."""
        plan = {"start": digest_of(self.start.path) if self.start.path else NATIVE_HEAD, "seed": self.options.seed}
        path = self.work / "plan.json"
        if not path.exists() or json.loads(path.read_text()) != plan:
            shutil.rmtree(self.work, ignore_errors=True)
        elif (self.work / "head.training" / "checkpoint.pt").exists():
            note("going on where the last run was interrupted")
        self.work.mkdir(parents=True, exist_ok=True)
        self.work.parent.chmod(0o700)
        write_whole(path, json.dumps(plan))
        write_whole(self.work / "records.jsonl", "".join(_lines(self.parts.training)))

    def report(self, lines: list[str], damaged: int) -> Report:
        """Do it all."""
        general = self._general()
        self._train([self.work / "records.jsonl", *general])
        own, others = self._compare()
        better = own.is_better
        if better:
            (before, after), date = own.lengths, time.strftime("%Y-%m-%d")
            facts = Adapted(kind=self.start.kind, date=date, base=self.start.base, before=before, after=after)
            keep(self.kept, self.head, facts)
        shutil.rmtree(self.work, ignore_errors=True)
        minutes = (time.monotonic() - self._begun) / 60
        data = {
            "adapted": better,
            "kind": self.start.kind,
            "path": str(self.kept) if better else None,
            "held_out": own.data(),
            "general": others.data(),
            "texts": {"training": len(self.parts.training), "held_out": len(self.parts.held_out),
                      "left_out": self.parts.alike, "damaged_lines": damaged},
            "minutes": round(minutes, 1),
        }  # fmt: skip
        verdict = (
            f"kept in {self.kept}: generate, chat and serve take it from now on, a running server after kill -HUP PID"
            if better
            else "not better beyond doubt: everything stays as it is; more records or more --minutes may help"
        )
        return Report(True, data, [*lines, own.line("held-out records"), others.line("general prompts"), verdict])

    def _general(self) -> list[Path]:
        """Text that the model writes to all kinds of prompts; none where it writes nothing of use."""
        tokens = sum(len(each.response_ids) for each in self.parts.training)
        wanted = own_data.DataOptions(
            model=self.options.model,
            config=self._config,
            out=self.work / "general",
            tokens=max(FEWEST_GENERAL, int(GENERAL_TOKENS * tokens)),
            minutes=GENERAL_SHARE * self.options.minutes,
            seed=self.options.seed,
        )
        with shown("general text") as show:
            written = own_data.run(wanted, lambda done, total, text: show(done / max(total, 1), text))
        return [wanted.out] if written.ok else []

    def _train(self, data: Seq[Path]) -> None:
        head = self.start.model.head
        assert head is not None
        known, spent = head.draft_token_ids, (time.monotonic() - self._begun) / 60
        training = TrainOptions(
            model=self.start.model.name,
            out=self.head,
            kind=self.start.kind,
            finetune=True,
            head=self.start.path,
            data=tuple(data),
            minutes=max(self.options.minutes * (1 - MEASURING_SHARE) - spent, 0.1 * self.options.minutes),
            draft_vocab=MORE_TOKENS + (TrainOptions.draft_vocab if known is None else len(known)),
            depth=_depth(head.spec),
            threads=self.options.threads,
            seed=self.options.seed,
            measured=False,
            learned=LEARNED,
        )
        train(training)

    def _compare(self) -> tuple[Comparison, Comparison]:
        pair = Pair(self.start.model, self._config, None, str(self.head))
        own = [Asked.of(each) for each in self.parts.held_out[-MOST_HELD_OUT:]]
        drawn = templated_prompts(GENERAL_SEED, GENERAL_PROMPTS, [], [])
        prompts = [*(prompt for _, prompt in builtin_prompts()), *(each.prompt for each in drawn)][:GENERAL_PROMPTS]
        params = SamplingParams(max_tokens=GENERAL_ANSWER, seed=0)
        general = [Asked(pair.encode(prompt), params) for prompt in prompts]
        end = max(self._begun + 60 * self.options.minutes, time.monotonic())
        with shown("measuring") as show:

            def goes_on(count: int) -> bool:
                show(count / len(own), f"{count} of {len(own)} held-out requests")
                return time.monotonic() < end

            return pair.compare(own, goes_on), pair.compare(general)


def _depth(spec: HeadSpec) -> int | None:
    """Draft steps to train: as the kind has it, as far as the head has modules; of a block its rows."""
    training = head_kind(spec.kind).training
    assert training is not None
    return spec.depth_limit if spec.block else min(training.depth, spec.depth_limit)


def _lines(records: Seq[Record]) -> Iterator[str]:
    """As training reads them: pieces of long texts, each behind the end of what came before it."""
    for record in records:
        ids, end = (*record.prompt_ids, *record.response_ids), len(record.prompt_ids)
        while end < len(ids):
            first = end
            end = min(first + MAX_TOKENS - CONTEXT, len(ids))
            document: dict[str, Any] = {
                "kind": "records",
                "prompt_ids": ids[max(0, end - MAX_TOKENS) : first],
                "response_ids": ids[first:end],
                "held_out": seed_of(record) % JUDGED_EVERY == 0,
            }
            yield json.dumps(document) + "\n"
