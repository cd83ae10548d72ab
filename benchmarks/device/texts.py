"""What a head learns from: prompts of several kinds, and chunks of text that the trunk writes to them.

Prompts: the model's own (after the bare user turn; see train/own_prompts.py), this package's templates, around passages
of Python's documentation and of docs/, and prompt files that were taken along. One in `every` by the prompt's hash is
held out: only the first chunk, which nothing is trained on, has answers to these.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from device.clock import say
from device.writer import Job, Writer, Written
from headstart.errors import UsageError
from headstart.files import write_atomic
from headstart.text.tokenizer import Tokenizer
from headstart.train.generate import (
    GREEDY_SHARE,
    OWN_KIND,
    PROMPT_TOKENS,
    TEMPERATURE,
    TEMPERATURES,
    TOP_P,
    is_usable,
    read_prompts,
)
from headstart.train.plain_text import TextPiece, passages, read_documents
from headstart.train.prompts import templated_prompts
from headstart.train.records import ChatTokenizer, Example, SkippedRecords, example_of_answer

MARK = "user-turn-mark"
OWN_SHARE, FILE_SHARE = 0.45, 0.15
"""Of the answers; templates are the rest. Of the model's attempts at prompts about two thirds turn out usable.
An answer takes 0.6 of what it may."""
ATTEMPTS, MEAN_ANSWER = 1.5, 0.6
SHORT, LONG = 128, 512
"""Tokens of a prompt: the two sizes of slots."""
ROOT = Path(__file__).parents[2]
_POOL = ThreadPoolExecutor(1)


@dataclass
class Prompts:
    """Jobs by chunk number; the same for the same seed. `answer`: most tokens of an answer."""

    tokenizer: Tokenizer
    text: ChatTokenizer
    files: Sequence[Path]
    seed: int
    every: int
    answer: int
    turn: list[int] = field(init=False)

    def __post_init__(self) -> None:
        asked = [{"role": "user", "content": MARK}]
        self._around = self.text.render(asked, True).split(MARK)
        self.turn = self.text.encode(self.text.render(asked, False).split(MARK)[0])
        given = read_prompts(self.files) if self.files else []
        self._given = [(each.kind, str(each.messages[-1]["content"])) for each in given]
        prose = read_documents([ROOT / "docs"], SkippedRecords()) + read_documents([], SkippedRecords())
        pieces = [TextPiece(each.text, each.kind, "at hand") for each in prose if each.kind == "prose"]
        self._passages = [text for text, _ in passages(pieces)]

    def held_out(self, prompt: str) -> bool:
        return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % self.every == 0

    def own(self, count: int) -> list[Job]:
        return [Job(tuple(self.turn), OWN_KIND, TEMPERATURE, min(PROMPT_TOKENS, self.answer), TOP_P)] * count

    def given(self, number: int, count: int) -> list[Job]:
        """Of files and templates, of the side of this chunk."""
        num_files = int(count * FILE_SHARE / (1 - OWN_SHARE)) if self._given else 0
        first = number * num_files
        wanted = [(*self._given[i % len(self._given)], i // len(self._given)) for i in range(first, first + num_files)]
        over = self.every if number == 0 else 1
        made = templated_prompts(hash((self.seed, number)), over * (count - num_files), self._passages, [])
        found = wanted + [(each.kind, each.prompt, 0) for each in made]
        jobs = (self.job(kind, prompt, number, again) for kind, prompt, again in found)
        return list(islice((job for job in jobs if job), count))

    def job(self, kind: str, prompt: str, number: int, again: int = 0) -> Job | None:
        """None where the prompt is of the other side, or too long. An answer that is given again is drawn warm."""
        if self.held_out(prompt) != (number == 0):
            return None
        ids = self.text.encode(prompt.join(self._around))
        if len(ids) > LONG:
            return None
        rng = random.Random(f"{self.seed} {again} {prompt}")
        greedy = rng.random() < GREEDY_SHARE and not again
        return Job(tuple(ids), kind, 0.0 if greedy else round(rng.uniform(*TEMPERATURES), 2), self.answer)

    def asked(self, written: Written, number: int) -> Job | None:
        """The answer to a prompt that the model has written, if that is of use."""
        prompt = self.tokenizer.decode(written.tokens, skip_special=True).strip()
        return self.job(OWN_KIND, prompt, number) if written.ended and is_usable(prompt, "en") else None


@dataclass
class Texts:
    """Chunks of about `tokens` tokens of answers, in files of `folder`. `writers`: of short and of long prompts."""

    prompts: Prompts
    writers: tuple[Writer, Writer]
    folder: Path
    tokens: int
    seed: int
    _next: tuple[int, Future[list[Job]]] | None = None

    def path(self, number: int) -> Path:
        return self.folder / f"text-{number:04}.npz"

    def there(self, number: int) -> bool:
        return self.path(number).exists()

    def write(self, number: int, tokens: int, seeded: Callable[[int], None], late: Callable[[], bool]) -> int:
        """Write a chunk, unless there is one; the number of its answers' tokens. Late: nothing is kept."""
        if self.there(number):
            return 0
        seeded((self.seed << 16) + number)
        count = max(2, int(tokens / (MEAN_ANSWER * self.prompts.answer)))
        given = max(1, int(count * (1 - OWN_SHARE)))
        found: list[Written] = []
        short: deque[Job] = deque()
        long: deque[Job] = deque()
        for job in self._given(number, given):
            (short if len(job.ids) <= SHORT else long).append(job)
        attempts = count * OWN_SHARE * ATTEMPTS * (self.prompts.every if number == 0 else 1)
        narrow = deque(self.prompts.own(max(1, int(attempts))))

        def follow(written: Written) -> None:
            if written.job.top_p == 1:
                found.append(written)
            elif job := self.prompts.asked(written, number):
                (short if len(job.ids) <= SHORT else long).append(job)

        for writer, queue in zip(self.writers, (short, long), strict=True):
            for _ in writer.run(queue, narrow if writer.narrow else deque(), follow, late):
                pass
        if late():
            return 0
        self._keep(number, found)
        if number:  # the next prompts are made while this text is learned from
            self._next = (number + 1, _POOL.submit(self.prompts.given, number + 1, given))
        return sum(len(each.tokens) for each in found)

    def _given(self, number: int, count: int) -> list[Job]:
        if self._next and self._next[0] == number:
            return self._next[1].result()
        return self.prompts.given(number, count)

    def _keep(self, number: int, found: list[Written]) -> None:
        if not found:
            raise UsageError(f"no prompt of chunk {number} came to an answer", "raise --held-out, --chunk or --answer")
        kinds = sorted({each.job.kind for each in found})
        ids = [np.asarray((*each.job.ids, *each.tokens), np.int32) for each in found]
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f"writing-{number}.npz"
        np.savez(
            aside,
            ids=np.concatenate(ids),
            lengths=[len(each) for each in ids],
            prompts=[len(each.job.ids) for each in found],
            kinds=np.asarray([kinds.index(each.job.kind) for each in found]),
            names=np.asarray(kinds),
        )
        aside.replace(self.path(number))
        write_atomic(self.folder / "chunks", f"{number + 1}\n")
        say(f"chunk {number}: {len(found):,} answers, {sum(map(len, ids)):,} tokens with their prompts")

    def examples(self, number: int) -> list[Example]:
        with np.load(self.path(number)) as kept:
            ids, names = kept["ids"], kept["names"].tolist()
            ends, prompts, kinds = np.cumsum(kept["lengths"]), kept["prompts"].tolist(), kept["kinds"].tolist()
        found = []
        for i, part in enumerate(np.split(ids, ends[:-1])):
            if len(part) - prompts[i] >= 3:
                found.append(example_of_answer(names[kinds[i]], part, prompts[i], number == 0))
        return found
