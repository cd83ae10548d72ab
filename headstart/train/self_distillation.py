"""`headstart data`: text to train a head on, most of it written by the model itself.

The output folder holds `answers-*.jsonl` (prompts and the model's answers, with the exact tokens), `text-*.jsonl`
(plain text from files), `own.state` (number of prompts that the model has begun) and `manifest.json`. The same command
continues an earlier run.
"""

import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from headstart.api import LLM
from headstart.config import EngineConfig, one_adapter
from headstart.core import Progress, Report, no_progress
from headstart.errors import UsageError
from headstart.files import locked_folder, write_atomic
from headstart.hub import DEFAULT_MODEL
from headstart.train import generate
from headstart.train.flags import DataFlags
from headstart.train.options import TrainOptions, check_amount, check_limits
from headstart.train.plain_text import TextPiece, foreign_passages, passages, read_tree, text_records
from headstart.train.prompts import TRANSLATION, follow_ups, templated_prompts
from headstart.train.records import Shards
from headstart.version import __version__

WAVE = 512  # prompts that are answered together
OWN_SHARE, FOLLOW_UP_SHARE = 0.45, 0.15
"""Shares of a wave: prompts that the model wrote, and second turns after earlier answers. Templates are the rest."""
MAX_TEMPLATES = 20_000
OWN_ATTEMPTS = 384  # prompts that the model begins at once; about two thirds are usable
MIN_ATTEMPTS = 16
OWN_FILES = {"manifest.json", "own.state", "answers-00000.jsonl", "text-00000.jsonl"}
"""Files that identify a folder written by an earlier run."""
OWN_TIME = 0.25  # upper bound for writing prompts, as a share of the remaining time
MAX_TURN_CHARACTERS = 1200  # longest answer that a second turn may follow
MAX_SEQS = 32
TEXT_SHARE, MAX_TEXT_TOKENS, CHARACTERS_PER_TOKEN = 0.3, 3_000_000, 4
"""Upper bound of plain text, as a share of the requested tokens (of MAX_TEXT_TOKENS where only a time is given)."""
WRITING_SHARE = 0.3  # share of a training without given text in which the model writes its own


@dataclass(frozen=True, kw_only=True)
class DataOptions(DataFlags):
    """DataFlags with the engine's options. At least one of `tokens` and `minutes` is given."""

    config: EngineConfig = field(default_factory=EngineConfig)
    seed: int = 0


def check(options: DataOptions) -> None:
    """Raises UsageError for options that cannot work."""
    if options.tokens is None and options.minutes is None and not options.only_prompts:
        raise UsageError("data needs a bound", "give --tokens N, --minutes M, or --only-prompts")
    check_limits(options.minutes, options.tokens)
    if missing := next((path for path in options.text if not path.exists()), None):
        raise UsageError(f"--text: there is no {missing}", "give a folder of documents or source code, or a file")
    if options.only_prompts and not options.prompts:
        raise UsageError("--only-prompts, but there are no prompts", "give --prompts FILE")
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"--out: {options.out} is a file", "give a folder")
    if options.out.is_dir() and (entries := {each.name for each in options.out.iterdir()}) and not entries & OWN_FILES:
        raise UsageError(f"--out: {options.out.resolve()} holds other files", "give a folder of its own, or a new name")
    earlier = _writer(options.out / "manifest.json")
    writer = [options.model or DEFAULT_MODEL, *(path for _, path in options.config.adapters[:1])]
    # the same model may be in another folder
    if earlier and [Path(each).name for each in earlier] != [Path(each).name for each in writer]:
        what = f"--out: {options.out} holds text of {' with '.join(earlier)}, not of {' with '.join(writer)}"
        raise UsageError(what, "give another folder")


def _writer(manifest: Path) -> list[str]:
    """The model that wrote the text so far, and its adapter if it had one; empty if unknown."""
    try:
        found = json.loads(manifest.read_text("utf-8"))
        return [str(found[key]) for key in ("model", "lora") if found.get(key)]
    except (OSError, ValueError, AttributeError):
        return []


def run(options: DataOptions, progress: Progress = no_progress) -> Report:
    """Write data up to the bound. Raises UsageError, and CapacityError when the disk is full; records stay usable."""
    check(options)
    config = replace(options.config, drafter="none", depth=0, max_num_seqs=max(options.config.max_num_seqs, MAX_SEQS))
    with locked_folder(options.out):
        prompts = generate.read_prompts(options.prompts)
        pieces = [piece for folder in options.text for piece in read_tree(folder)]
        progress(0, 1, "loading the model")
        data_run = _DataRun(options, LLM(options.model, config), pieces, progress)
        try:
            data_run.write_text()
            data_run.write_answers(prompts)
        finally:
            data_run.close()
        return data_run.report()


def with_own_text(options: TrainOptions, progress: Progress) -> TrainOptions:
    """Lets the model write the training text of its head; another run adds to it. Returns the options with that text
    and the remaining minutes. Raises UsageError if the text is too short."""
    begun = time.monotonic()
    data_options = DataOptions(
        model=options.model,
        config=EngineConfig(threads=options.threads, device=options.device, lora=one_adapter(options.lora)),
        out=options.own_text,
        minutes=options.minutes and options.minutes * WRITING_SHARE,
        tokens=options.tokens and max(options.tokens, 2 * options.min_text_tokens),  # some answers are of no use
        seed=options.seed,
    )
    report = run(data_options, progress)
    if not report.ok:
        what = f"the model has written no training text; {report.lines[-1]}"
        raise UsageError(what, "give --data or --prompts")
    check_amount(report.data["answer_tokens"], options.min_text_tokens)
    left = options.minutes and options.minutes - (time.monotonic() - begun) / 60
    return replace(options, data=(options.own_text,), minutes=left)


class _DataRun:
    """One run over one folder."""

    def __init__(self, options: DataOptions, llm: LLM, pieces: Sequence[TextPiece], progress: Progress) -> None:
        self.options, self.llm, self.pieces, self._progress = options, llm, pieces, progress
        self.answers, self.text = Shards(options.out, "answers"), Shards(options.out, "text")
        self._state = options.out / "own.state"
        attempts = self._state.read_text() if self._state.exists() else ""
        self._own_attempts = int(attempts) if attempts.isdecimal() else 0  # else a full disk has emptied the file
        self._seen: set[str] = set()
        self._second_turns: list[generate.ConversationPrompt] = []
        self._kinds: dict[str, Counter[str]] = defaultdict(Counter)
        self._sources: dict[str, Counter[str]] = defaultdict(Counter)
        self.tokens = 0
        for record in self.answers:
            self._add_answer(record)
        for record in self.text:
            self._count(record)
        self._before = self.tokens
        self._started = time.monotonic()

    def write_text(self) -> None:
        """Write the plain text, or a random part of it: a head should learn mainly from answers."""
        characters_left = TEXT_SHARE * (self.options.tokens or MAX_TEXT_TOKENS) * CHARACTERS_PER_TOKEN
        pieces = random.Random(self.options.seed).sample(self.pieces, len(self.pieces))
        for record in text_records(pieces, self.options.licence):
            if self.text.append(record):
                self._count(record)
            characters_left -= len(record["text"])
            if characters_left <= 0:
                break

    def write_answers(self, prompts: Sequence[generate.ConversationPrompt]) -> None:
        """Answer the prompt files, then waves of other prompts, until the bound is reached."""
        self._answer(prompts)
        if self.options.only_prompts:
            return
        templates = self._templates()
        while not self._end_reason():
            wave = self._wave(templates)
            before = len(self.answers)
            self._answer(wave)
            if len(self.answers) == before:  # no prompt of the wave could be answered: later ones neither
                break

    def _wave(self, templates: Iterator[generate.ConversationPrompt]) -> list[generate.ConversationPrompt]:
        own, num_turns = list(islice(self._own_prompts(), int(WAVE * OWN_SHARE))), int(WAVE * FOLLOW_UP_SHARE)
        turns, self._second_turns = self._second_turns[:num_turns], self._second_turns[num_turns:]
        known = self.answers.keys
        fresh = (prompt for prompt in templates if prompt.key not in known)
        return [*own, *turns, *islice(fresh, WAVE - len(own) - len(turns))]

    def _own_prompts(self) -> Iterator[generate.ConversationPrompt]:
        """Prompts that the model writes, each beginning once. The number of attempts is stored for the next run."""
        self._show("writing prompts")
        options, count = self.options, OWN_ATTEMPTS
        if options.tokens is not None:  # a small run needs few
            count = min(count, max(MIN_ATTEMPTS, 2 * (options.tokens - self.tokens) // options.max_tokens))
        first, self._own_attempts = self._own_attempts, self._own_attempts + count
        started = time.monotonic()
        end = self._started + (options.minutes or math.inf) * 60

        def should_stop() -> bool:
            return time.monotonic() > started + OWN_TIME * max(0.0, end - started)

        prompts = list(generate.write_prompts(self.llm, first, count, options.seed, options.language, should_stop))
        write_atomic(self._state, str(self._own_attempts))
        for prompt in prompts:
            if (beginning := generate.fingerprint(prompt)) not in self._seen:
                self._seen.add(beginning)
                yield prompt

    def _templates(self) -> Iterator[generate.ConversationPrompt]:
        """Prompts from templates, over passages of the plain text."""
        if not self.llm.has_chat_template:
            return
        texts, foreign = passages(self.pieces), foreign_passages(self.pieces)
        prompts = templated_prompts(
            self.options.seed, MAX_TEMPLATES, [text for text, _ in texts], [text for text, _ in foreign]
        )
        for each in prompts:
            sources = sorted({(foreign if each.kind == TRANSLATION else texts)[i][1] for i in each.passages})
            messages = ({"role": "user", "content": each.prompt},)
            licence = self.options.licence if sources else each.licence
            yield generate.ConversationPrompt(messages, each.kind, licence, ", ".join(["template", *sources]))

    def _answer(self, prompts: Sequence[generate.ConversationPrompt]) -> None:
        generate.answer_prompts(
            self.llm, prompts, self.answers, seed=self.options.seed, max_tokens=self.options.max_tokens, wave=WAVE,
            on_record=self._on_record, should_end=self._end_reason,
        )  # fmt: skip

    def _count(self, record: dict[str, Any]) -> None:
        tokens = len(record.get("response_ids", ()))
        source = f"{record['source']} ({record['licence']})"
        for counter in (self._kinds[record["kind"]], self._sources[source]):
            counter.update(records=1, answer_tokens=tokens, text_characters=len(record.get("text", "")))

    def _add_answer(self, record: dict[str, Any]) -> None:
        """Count an answer and the beginning of its prompt; some answers get a second turn."""
        self._count(record)
        self.tokens += len(record["response_ids"])
        messages, rng = record["messages"], random.Random(f"{self.options.seed} turn {record['key']}")
        self._seen.add(generate.fingerprint(generate.ConversationPrompt(tuple(messages[:-1]), "")))
        wanted = rng.random() < FOLLOW_UP_SHARE / (1 - FOLLOW_UP_SHARE)
        complete = record["finish_reason"] == "stop" and len(messages[-1]["content"]) < MAX_TURN_CHARACTERS
        if len(messages) == 2 and wanted and complete and self.llm.has_chat_template:
            turns = (*messages, {"role": "user", "content": rng.choice(follow_ups())})
            turn = generate.ConversationPrompt(turns, record["kind"], record["licence"], "second turn")
            if turn.key not in self.answers.keys:
                self._second_turns.append(turn)

    def _on_record(self, record: dict[str, Any]) -> None:
        self._add_answer(record)
        self._show("answering")

    def _end_reason(self) -> generate.EndReason | None:
        """Returns "enough" when the requested tokens are written, "late" when the time is over."""
        if self.options.tokens is not None and self.tokens >= self.options.tokens:
            return "enough"
        return "late" if self._is_late() else None

    def _is_late(self) -> bool:
        return self.options.minutes is not None and time.monotonic() - self._started > self.options.minutes * 60

    def _show(self, what: str) -> None:
        spent = time.monotonic() - self._started
        text = f"{what}: {self.tokens:,} tokens, {(self.tokens - self._before) / max(spent, 1e-9):.0f} tok/s"
        if self.options.tokens is not None:
            self._progress(min(self.tokens, self.options.tokens), self.options.tokens, text)
        else:
            self._progress(int(spent), int((self.options.minutes or 0) * 60) or int(spent) + 1, text)

    def close(self) -> None:
        """Close the shards and write the manifest."""
        self.answers.close()
        self.text.close()
        write_atomic(self.options.out / "manifest.json", json.dumps(self.manifest(), indent=2) + "\n")

    def manifest(self) -> dict[str, Any]:
        """Counts by kind, sources with their licences, model, path of its adapter, and seed."""
        return {
            "headstart_version": __version__,
            "model": self.llm.model.name,
            "lora": next(iter(self.llm.adapters.values()), None),
            "seed": self.options.seed,
            "answer_tokens": self.tokens,
            "kinds": {kind: dict(counts) for kind, counts in sorted(self._kinds.items())},
            "sources": {name: dict(counts) for name, counts in sorted(self._sources.items())},
        }

    def report(self) -> Report:
        spent, new = time.monotonic() - self._started, self.tokens - self._before
        data = {**self.manifest(), "out": str(self.options.out), "new_tokens": new, "seconds": round(spent, 1)}
        lines = [
            f"{self.options.out}: {len(self.answers)} answers, {self.tokens:,} tokens; {len(self.text)} pieces of text",
            f"{new:,} tokens new in {spent / 60:.1f} minutes ({new / max(spent, 1e-9):.0f} tok/s)",
        ]
        for kind, counts in data["kinds"].items():
            lines.append(f"  {kind:<16} {counts['records']:>7} records  {counts['answer_tokens']:>10,} answer tokens")
        if not len(self.answers) and not len(self.text):
            lines.append(f"nothing was written: {self._empty_reason()}")
        return Report(bool(len(self.answers) or len(self.text)), data, lines)

    def _empty_reason(self) -> str:
        """Why there is no answer, and what to do."""
        if self.options.only_prompts:
            return "no prompt fits into the model's context together with --max-tokens; lower that"
        if self._is_late():
            return "the time was over before the first answer; give more --minutes"
        if not self.llm.has_chat_template:
            return "the model has no chat template, and its own prompts were of no use; give --prompts or --text"
        return "no prompt that the model wrote was of use; give --prompts, --text or --language any"
