"""`headstart data`: text to train a head on, most of it written by the model itself.

In the output folder: `answers-*.jsonl` (prompts and what the model says to them, with the exact tokens), `text-*.jsonl`
(plain text at hand, which the trunk labels in training), `own.state` (how far the model has come with prompts of its
own) and `manifest.json`. The same command goes on where an earlier run ended.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from headstart import __version__
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import Progress, Report, no_progress
from headstart.errors import UsageError
from headstart.files import alone_in, write_whole
from headstart.hub import DEFAULT_MODEL
from headstart.train.generate import ANSWER_TOKENS, Ending, Prompt, answer, read_prompts
from headstart.train.own_prompts import Language, fingerprint, write_prompts
from headstart.train.prompts import TRANSLATION, follow_ups, templated_prompts
from headstart.train.shards import Shards
from headstart.train.textfiles import Piece, foreign_passages, passages, read_tree, records

WAVE = 512
"""Prompts that are answered together."""
OWN_SHARE, FOLLOW_UP_SHARE = 0.45, 0.15
"""Of a wave, prompts that the model wrote itself, and second turns after earlier answers; templates are the rest."""
MOST_TEMPLATES = 20_000
OWN_ATTEMPTS = 384
"""Prompts of its own that the model begins at once; about two thirds turn out usable."""
FEWEST_ATTEMPTS = 16
OWN_FILES = {"manifest.json", "own.state", "answers-00000.jsonl", "text-00000.jsonl"}
"""Marks of a folder that an earlier run has written."""
OWN_TIME = 0.25
"""Of the time that is left, what writing prompts may take at most."""
LONGEST_TURN = 1200
"""Characters of an answer that a second turn may follow."""
MAX_SEQS = 32
TEXT_SHARE, MOST_TEXT_TOKENS, CHARACTERS_PER_TOKEN = 0.3, 3_000_000, 4
"""Plain text is at most this share of the tokens asked for (of the second number, where there is only a time)."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What to write. At least one of `tokens` (of answers, all runs together) and `minutes` (of this run)."""

    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    out: Path
    tokens: int | None = None
    minutes: float | None = None
    prompts: tuple[Path, ...] = ()
    text: tuple[Path, ...] = ()
    licence: str = "unknown"
    only_prompts: bool = False  # answer the prompt files, and nothing else
    language: Language = "en"
    max_tokens: int = ANSWER_TOKENS
    seed: int = 0


def check(options: DataOptions) -> None:
    """Raises UsageError for options that cannot work."""
    if options.tokens is None and options.minutes is None and not options.only_prompts:
        raise UsageError("data needs a bound", "give --tokens N, --minutes M, or --only-prompts")
    for name, value in (("--tokens", options.tokens), ("--minutes", options.minutes)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}, but must be a finite number above 0")
    if missing := next((path for path in options.text if not path.exists()), None):
        raise UsageError(f"--text: there is no {missing}", "give a folder of documents or source code, or a file")
    if options.only_prompts and not options.prompts:
        raise UsageError("--only-prompts, but there are no prompts", "give --prompts FILE")
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"--out: {options.out} is a file", "give a folder")
    if options.out.is_dir() and (entries := {each.name for each in options.out.iterdir()}) and not entries & OWN_FILES:
        raise UsageError(f"--out: {options.out.resolve()} holds other files", "give a folder of its own, or a new name")
    before, asked = _writer(options.out / "manifest.json"), options.model or DEFAULT_MODEL
    if before and Path(before).name != Path(asked).name:  # wherever they lie
        raise UsageError(f"--out: {options.out} holds text of {before}, not of {asked}", "give another folder")


def _writer(manifest: Path) -> str:
    """The model that has written the text so far; empty where that is not known."""
    try:
        return str(json.loads(manifest.read_text("utf-8"))["model"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def run(options: DataOptions, progress: Progress = no_progress) -> Report:
    """Write data up to the bound. Raises UsageError for bad input, CapacityError when the disk is full; what has been
    written stays good."""
    check(options)
    with alone_in(options.out):
        return _written(options, progress)


def _written(options: DataOptions, progress: Progress) -> Report:
    given = read_prompts(options.prompts)
    pieces = [piece for folder in options.text for piece in read_tree(folder)]
    progress(0, 1, "loading the model")
    config = replace(options.config, drafter="none", depth=0, max_num_seqs=max(options.config.max_num_seqs, MAX_SEQS))
    work = _Work(options, LLM(options.model, config), pieces, progress)
    try:
        work.write_text()
        work.write_answers(given)
    finally:
        work.close()
    return work.report()


class _Work:
    """One run over one folder."""

    def __init__(self, options: DataOptions, llm: LLM, pieces: Sequence[Piece], progress: Progress) -> None:
        self.options, self.llm, self.pieces, self._progress = options, llm, pieces, progress
        self.answers, self.text = Shards(options.out, "answers"), Shards(options.out, "text")
        self._state = options.out / "own.state"
        self._own_attempts = int(self._state.read_text()) if self._state.exists() else 0
        self._seen: set[str] = set()
        self._turns: list[Prompt] = []  # second turns that may be asked
        self._kinds: dict[str, Counter[str]] = defaultdict(Counter)
        self._sources: dict[str, Counter[str]] = defaultdict(Counter)
        self.tokens = 0
        for record in self.answers:
            self._note(record)
        for record in self.text:
            self._count(record)
        self._before = self.tokens
        self._started = time.monotonic()

    def write_text(self) -> None:
        """A random part of the text at hand where it is much: a head should learn answers most of all."""
        room = TEXT_SHARE * (self.options.tokens or MOST_TEXT_TOKENS) * CHARACTERS_PER_TOKEN
        pieces = random.Random(self.options.seed).sample(self.pieces, len(self.pieces))
        for record in records(pieces, self.options.licence):
            if self.text.append(record):
                self._count(record)
            room -= len(record["text"])
            if room <= 0:
                break

    def write_answers(self, given: Sequence[Prompt]) -> None:
        """Prompt files first, then waves of the other kinds, until the bound is reached."""
        self._answer(given)
        if self.options.only_prompts:
            return
        templates = self._templates()
        while not self._ending():
            wave = self._wave(templates)
            known = len(self.answers)
            self._answer(wave)
            if len(self.answers) == known:  # none of them can be answered, so nor can the next ones
                break

    def _wave(self, templates: Iterator[Prompt]) -> list[Prompt]:
        own = list(islice(self._own(), int(WAVE * OWN_SHARE)))
        turns, self._turns = self._turns[: int(WAVE * FOLLOW_UP_SHARE)], self._turns[int(WAVE * FOLLOW_UP_SHARE) :]
        known = self.answers.keys
        fresh = (prompt for prompt in templates if prompt.key not in known)
        return [*own, *turns, *islice(fresh, WAVE - len(own) - len(turns))]

    def _own(self) -> Iterator[Prompt]:
        """Prompts of the model's own, each beginning only once; their number so far is kept for the next run."""
        self._show("writing prompts")
        options, count = self.options, OWN_ATTEMPTS
        if options.tokens is not None:  # a small run does not begin hundreds
            count = min(count, max(FEWEST_ATTEMPTS, 2 * (options.tokens - self.tokens) // options.max_tokens))
        first, self._own_attempts = self._own_attempts, self._own_attempts + count
        late = self._late(time.monotonic())
        written = list(write_prompts(self.llm, first, count, options.seed, options.language, late))
        self._state.write_text(str(self._own_attempts))
        for prompt in written:
            if (begin := fingerprint(prompt)) not in self._seen:
                self._seen.add(begin)
                yield prompt

    def _late(self, begun: float) -> Callable[[], bool]:
        """Has the model written prompts for as long as it may, from `begun` on?"""
        if self.options.minutes is None:
            return lambda: False
        end = self._started + self.options.minutes * 60
        return lambda: time.monotonic() > begun + OWN_TIME * max(0.0, end - begun)

    def _templates(self) -> Iterator[Prompt]:
        """Prompts from this package's templates, over the passages of the text at hand."""
        if not self.llm.has_chat_template:
            return
        texts, foreign = passages(self.pieces), foreign_passages(self.pieces)
        licence, given = self.options.licence, ([text for text, _ in texts], [text for text, _ in foreign])
        for each in templated_prompts(self.options.seed, MOST_TEMPLATES, *given):
            where = foreign if each.kind == TRANSLATION else texts
            sources = sorted({where[i][1] for i in each.passages})
            source = ", ".join(["template", *sources])
            messages = ({"role": "user", "content": each.prompt},)
            yield Prompt(messages, each.kind, licence if sources else each.licence, source)

    def _answer(self, prompts: Sequence[Prompt]) -> None:
        seed, max_tokens = self.options.seed, self.options.max_tokens
        work = (self.llm, prompts, self.answers)
        answer(*work, seed=seed, max_tokens=max_tokens, wave=WAVE, done=self._done, until=self._ending)

    def _count(self, record: dict[str, Any]) -> None:
        tokens = len(record.get("response_ids", ()))
        source = f"{record['source']} ({record['licence']})"
        for counter in (self._kinds[record["kind"]], self._sources[source]):
            counter.update(records=1, answer_tokens=tokens, text_characters=len(record.get("text", "")))

    def _note(self, record: dict[str, Any]) -> None:
        """Count an answer, remember how its prompt began; offer a second turn after some."""
        self._count(record)
        self.tokens += len(record["response_ids"])
        messages, rng = record["messages"], random.Random(f"{self.options.seed} turn {record['key']}")
        self._seen.add(fingerprint(Prompt(tuple(messages[:-1]), "")))
        wanted = rng.random() < FOLLOW_UP_SHARE / (1 - FOLLOW_UP_SHARE)
        complete = record["finish_reason"] == "stop" and len(messages[-1]["content"]) < LONGEST_TURN
        if len(messages) == 2 and wanted and complete and self.llm.has_chat_template:
            asked = (*messages, {"role": "user", "content": rng.choice(follow_ups())})
            turn = Prompt(asked, record["kind"], record["licence"], "second turn")
            if turn.key not in self.answers.keys:
                self._turns.append(turn)

    def _done(self, record: dict[str, Any]) -> None:
        self._note(record)
        self._show("answering")

    def _ending(self) -> Ending | None:
        """Are there as many tokens as were asked for, or is the time over?"""
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
        write_whole(self.options.out / "manifest.json", json.dumps(self.manifest(), indent=2) + "\n")

    def manifest(self) -> dict[str, Any]:
        """Counts by kind, sources with their licences, and how it was made."""
        return {
            "headstart_version": __version__,
            "model": self.llm.model.name,
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
            lines.append(f"nothing was written: {self._why()}")
        return Report(bool(len(self.answers) or len(self.text)), data, lines)

    def _why(self) -> str:
        """Why there is no answer, and what to do."""
        if self.options.only_prompts:
            return "no prompt fits into the model's context together with --max-tokens; lower that"
        if self._is_late():
            return "the time was over before the first answer; give more --minutes"
        if not self.llm.has_chat_template:
            return "the model has no chat template, and its own prompts were of no use; give --prompts or --text"
        return "no prompt that the model wrote was of use; give --prompts, --text or --language any"
