"""`headstart probe --exact`: does an endpoint give the same text to the same request, whatever happens around it?

Each trial has a prompt that no cache holds. It is asked (A), another question about the same beginning is (B), then A
twice more: cold, warm, and warm again, which is the control. Then A streamed, without drafting, and among others. An
answer is a difference of such a condition only if it is none of those that A got alone; the control is made again then,
so that a server whose answers differ anyway (one that ignores seeds) is not said to differ by what it was tried with.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

from headstart.core import Progress, Report, no_progress
from headstart.errors import UsageError
from headstart.tools.client import Server
from headstart.tools.engine_metrics import Counts
from headstart.tools.probe.asking import OFF, SWITCHES, Asker, Lost, Refused, Said, entry_of
from headstart.tools.probe.cases import Case, Question, filler_of, prompt_of, seed_of
from headstart.tools.probe.known import Recognized, recognize
from headstart.tools.probe.tally import Condition, Tally
from headstart.tools.probe.told import document, lines

COMPANY = 8
"""Requests at a time, of which those that are compared are some."""
MOST_ROUNDS = 60
MINUTES, MAX_TOKENS = 3.0, 64
QUESTIONS: tuple[Question, ...] = ("asked", "other")


@dataclass(frozen=True, kw_only=True)
class ExactOptions:
    """`against`: a server of the same model that does not draft. `seed` None: drawn, so that no earlier run has filled
    the prefix cache. At least one round is made, however few minutes."""

    url: str
    against: str | None = None
    model: str | None = None
    api_key: str | None = None
    max_tokens: int = MAX_TOKENS
    minutes: float = MINUTES
    rounds: int = MOST_ROUNDS
    seed: int | None = None


@dataclass
class Found:
    """What a run has come to. `cached` and `uncached`: answers to a prompt that had been asked before, whose server
    told that it had some of it, or nothing. `untested`: (what, why)."""

    engine: Recognized
    tally: Tally = field(default_factory=Tally)
    untested: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cached: int = 0
    uncached: int = 0
    refused: int = 0
    told_apart: int = 0  # sampled texts that are not the greedy ones
    sampled: int = 0


@dataclass(frozen=True)
class Alone:
    """All answers to one request that nothing else ran beside."""

    case: Case
    prompt: str
    seed: int
    cold: Said
    warm: Said
    again: Said

    @property
    def known(self) -> tuple[Said, ...]:
        return self.cold, self.again


def run(options: ExactOptions, progress: Progress = no_progress) -> Report:
    """`ok`: nothing differed. Raises UsageError where nothing could be compared."""
    server = Server.at(options.url, options.api_key)
    listed = entry_of(server, options.model)
    found = Found(recognize(server, listed))
    other = Server.at(options.against, options.api_key) if options.against else None
    there = entry_of(other, options.model) if other else None
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed

    async def work() -> None:
        asker = await Asker.at(server, listed, options.max_tokens, seed)
        against = await Asker.at(other, there, options.max_tokens, seed) if other and there else None
        trials = Trials(asker, against, found, seed)
        await trials.run(options.minutes, options.rounds, progress)

    asyncio.run(work())
    data = document(found, {"url": str(server), "against": str(other) if other else None, "model": listed["id"],
                            "seed": seed, "max_tokens": options.max_tokens})  # fmt: skip
    return Report(data["verdict"] == "exact", data, lines(data))


class Trials:
    """The rounds of one run."""

    def __init__(self, asker: Asker, against: Asker | None, found: Found, seed: int) -> None:
        self._asker, self._against, self._found, self._seed = asker, against, found, seed
        self._tally = found.tally
        self._ways: dict[str, dict[str, Any]] = {}
        self._drafts_off = 0

    async def run(self, minutes: float, rounds: int, progress: Progress) -> None:
        """So many rounds, or until the time is up. Raises UsageError when the first does not come to its end."""
        begun, total = time.monotonic(), 60 * minutes
        if self._against is None:
            switch = SWITCHES.get(self._found.engine.name or "", {})
            self._ways = {way: fields for way, fields in switch.items() if await self._asker.takes(**fields)}
        before = [await each.metrics() for each in self._servers]
        number = -1
        try:
            for number in range(rounds):
                done = []
                for case in self._asker.cases:
                    spent = time.monotonic() - begun
                    if number and spent > total:
                        break
                    progress(round(min(spent, total)), max(1, round(total)), f"round {number + 1}: {case}")
                    done += await self._alone(case, number)
                await self._in_company(done, number)
                if time.monotonic() - begun > total:
                    break
        except Lost as lost:
            if not number:
                raise UsageError(str(lost), "see the server's log") from None
            self._found.untested.append(("the rest", str(lost)))
        if not self._tally.cells:
            raise UsageError(f"{self._asker.server} refused all that was to be compared", "is it too busy?")
        after = [await each.metrics() for each in self._servers]
        counted = [now.since(then) if now and then else None for now, then in zip(after, before, strict=True)]
        self._look_back(counted)

    @property
    def _servers(self) -> list[Asker]:
        return [self._asker, self._against] if self._against else [self._asker]

    async def _alone(self, case: Case, number: int) -> list[Alone]:
        """One trial without company: a list of one, or of none where the server refused."""
        asked, other = (prompt_of(case, self._seed, number, which) for which in QUESTIONS)
        seed = seed_of(self._seed, number)
        try:
            cold = await self._asker.ask(case, asked, seed)
            await self._asker.ask(case, other, seed)
            warm, again = [await self._asker.ask(case, asked, seed) for _ in range(2)]
            alone = Alone(case, asked, seed, cold, warm, again)
            self._tally.add("again", case, warm, again)
            self._see_cache(alone)
            await self._streamed(alone)
            await self._drafting(alone)
            if case.sampled and not self._found.told_apart:
                greedy = await self._asker.ask(Case(case.form, False), asked, seed)
                self._found.sampled += 1
                self._found.told_apart += greedy.text != warm.text
        except Refused:
            self._found.refused += 1
            return []
        return [alone]

    def _see_cache(self, alone: Alone) -> None:
        cached = alone.warm.cached
        if cached == 0:
            self._found.uncached += 1
            return
        self._found.cached += bool(cached)
        self._tally.add("warm", alone.case, alone.cold, alone.warm)

    async def _streamed(self, alone: Alone) -> None:
        said = await self._asker.ask(alone.case, alone.prompt, alone.seed, streamed=True)
        await self._compare("streamed", alone, said)

    async def _drafting(self, alone: Alone) -> None:
        """Without drafting: there, or here where a request can say so; then with more."""
        if self._against is None:
            for way, fields in self._ways.items():
                said = await self._asker.ask(alone.case, alone.prompt, alone.seed, **fields)
                self._drafts_off += said.drafts or 0 if way == OFF else 0
                await self._compare("drafting", alone, said)
            return
        if alone.case not in self._against.cases:
            return
        first = await self._against.ask(alone.case, alone.prompt, alone.seed)
        if first.text not in {alone.warm.text, *(each.text for each in alone.known)}:
            # its cache is cold, and its answers may differ from each other
            first, second = [await self._against.ask(alone.case, alone.prompt, alone.seed) for _ in range(2)]
            self._tally.add("there again", alone.case, first, second)
        await self._compare("drafting", alone, first)

    async def _compare(self, condition: Condition, alone: Alone, said: Said) -> None:
        """After a difference the control is made once more, with two new answers: what the server keeps of the prompt
        may be another by now, computed in company or without drafts, and is no fault of asking twice."""
        if not self._tally.add(condition, alone.case, alone.warm, said, known=alone.known):
            one, other = [await self._asker.ask(alone.case, alone.prompt, alone.seed) for _ in range(2)]
            self._tally.add("again", alone.case, one, other)

    async def _in_company(self, done: list[Alone], number: int) -> None:
        """All of a round at once, with others that go on for longer."""
        asker, fillers = self._asker, max(COMPANY - len(done), 1)
        others = [
            asyncio.create_task(asker.fill(filler_of(self._seed, number, place), place + 1)) for place in range(fillers)
        ]
        tasks = [asyncio.create_task(asker.ask(each.case, each.prompt, each.seed)) for each in done]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*others, return_exceptions=True)
        for alone, said in zip(done, answers, strict=True):
            if isinstance(said, Refused):
                self._found.refused += 1
            elif isinstance(said, BaseException):
                raise said
            else:
                await self._compare("company", alone, said)

    def _look_back(self, counted: list[Counts | None]) -> None:
        """What the run could not show, and why."""
        found, asker = self._found, self._asker
        found.untested += asker.refusals
        if self._against is not None:
            found.untested += [(f"{what} at --against", why) for what, why in self._against.refusals]
        if found.engine.slots == 1:
            found.untested.append(("company", "the server runs one request at a time"))
        if found.uncached and not found.cached:
            found.untested.append(("warm", "the server had nothing of a prompt in its cache when it was asked again"))
        if found.refused:
            found.notes.append(f"{found.refused} trials were refused by the server, and are not counted")
        if found.sampled and not found.told_apart:
            found.notes.append("temperature 1 gave the greedy text each time: does the server heed it?")
        self._see_drafts(*counted)

    def _see_drafts(self, here: Counts | None, there: Counts | None = None) -> None:
        """Was there drafting on one side, and none on the other?"""
        found = self._found
        if self._against is None and not self._ways:
            why = "this server's requests cannot leave it out; --against URL names a second server, without drafting"
            found.untested.append(("drafting", why))
            return
        drafts = self._asker.drafts
        if drafts is None and here is not None and here.known:
            drafts = int(here.drafts or here.drafted or 0)
        if drafts == 0:
            found.untested.append(("drafting", "the server drafted nothing"))
        elif drafts is None:
            found.notes.append("whether the server drafts cannot be told: it shows no metrics of that")
        else:
            found.notes.append(f"{drafts} drafts were made")
        if self._drafts_off or (there is not None and there.active):
            found.untested.append(("drafting", "it drafted on both sides"))
