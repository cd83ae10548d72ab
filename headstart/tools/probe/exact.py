"""`headstart probe --exact`: tests whether an endpoint answers the same request with the same text in all conditions.

Each trial has a new prompt, which is in no cache. Request A is sent (cold cache), then request B with the same
beginning, then A twice more: warm, and warm again as the control. Then A is streamed, sent without drafting, and sent
together with other requests. An answer counts as different only if A got none like it when sent alone. After a
difference the control is repeated, so that a server whose answers vary anyway (one that ignores seeds) is recognized.
"""

import asyncio
import math
import random
import time
from collections.abc import Iterable, Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headstart.core import Progress, Report, no_progress
from headstart.errors import UsageError
from headstart.formats.json_object import read_packaged
from headstart.tools.client import Server, find_model, get_object
from headstart.tools.engine_metrics import EngineCounters
from headstart.tools.options import ProbedServer
from headstart.tools.probe.endpoint import EndpointLost, EndpointRefused
from headstart.tools.probe.exact_requests import (
    ExactClient,
    ProbeResponse,
    Question,
    RequestCase,
    make_filler,
    make_prompt,
    request_seed,
    sampling_name,
)
from headstart.tools.prompts import first_difference

Condition = Literal["again", "there again", "warm", "streamed", "drafting", "company"]
CONDITIONS: dict[Condition, str] = {
    "again": "asked twice, alone",
    "there again": "asked twice, alone, at --against",
    "warm": "prefix cache cold and warm",
    "streamed": "streamed and whole",
    "drafting": "drafting on and off",
    "company": "alone and in company",
}
CONTROLS: tuple[Condition, ...] = ("again", "there again")
"""Control conditions. If they show differences, differences under other conditions prove nothing."""
Verdict = Literal["exact", "differences", "not reproducible"]
OUTCOMES = {"equal": "equal", "differs": "DIFFERS", "cannot tell": "differs, but so does one request asked twice"}
CONFIDENCE = 0.95
CONTEXT_CHARACTERS = 30  # characters shown before and after a first difference
Row = dict[str, Any]  # one condition, greedy or sampled, as in the JSON document


@dataclass(frozen=True)
class TextDifference:
    case: str
    character: int  # index of the first different character
    token: int | None  # index of the first different token; None: unknown
    one: str  # first text around the difference
    other: str  # second text around the difference


def find_difference(case: RequestCase, one: ProbeResponse, other: ProbeResponse) -> TextDifference:
    place, token = first_difference(one.text, other.text) or 0, None
    if one.token_ids is not None and other.token_ids is not None:
        token = first_difference(one.token_ids, other.token_ids)
        token = len(one.token_ids) if token is None else token
    shown = slice(max(0, place - CONTEXT_CHARACTERS), place + CONTEXT_CHARACTERS)
    return TextDifference(str(case), place, token, one.text[shown], other.text[shown])


def upper_bound(differences: int, trials: int) -> float:
    """Returns the upper confidence bound of the rate of differences: the one-sided limit of Clopper and Pearson
    (Biometrika 26, 1934). Without a difference it is about 3 / trials."""
    if differences >= trials:
        return 1.0

    def chance(rate: float) -> float:
        return sum(math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(differences + 1))

    low, high = differences / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) > 1 - CONFIDENCE else (low, middle)
    return high


@dataclass
class TrialCounts:
    trials: int = 0
    differences: int = 0
    first: TextDifference | None = None


@dataclass
class Comparisons:
    counts: dict[tuple[Condition, RequestCase], TrialCounts] = field(default_factory=dict)

    def add(
        self, condition: Condition, case: RequestCase, one: ProbeResponse, other: ProbeResponse, *,
        known: Iterable[ProbeResponse] = (),
    ) -> bool:  # fmt: skip
        """Counts a comparison of two answers; returns whether they are the same. `known`: further answers to the same
        request in the condition of `one`; a text equal to one of them also counts as the same."""
        counts = self.counts.setdefault((condition, case), TrialCounts())
        is_same = other.text in {one.text, *(each.text for each in known)}
        counts.trials += 1
        if not is_same:
            counts.differences += 1
            counts.first = counts.first or find_difference(case, one, other)
        return is_same

    def results(self) -> list[Row]:
        """Returns the JSON rows in the order of CONDITIONS, greedy before sampled."""
        found = (self._result(name, sampled) for name in CONDITIONS for sampled in (False, True))
        return [each for each in found if each]

    def _result(self, condition: Condition, sampled: bool) -> Row | None:
        here = [(name, case.form, counts) for (name, case), counts in self.counts.items() if case.sampled == sampled]
        forms = {form: counts for name, form, counts in here if name == condition}
        if not forms:
            return None
        trials = sum(each.trials for each in forms.values())
        differences = sum(each.differences for each in forms.values())
        controls = () if condition in CONTROLS else CONTROLS if condition == "drafting" else CONTROLS[:1]
        is_unknown = any(counts.differences for name, _, counts in here if name in controls)
        first = next((each.first for each in forms.values() if each.first), None)
        return {
            "condition": condition,
            "means": CONDITIONS[condition],
            "sampling": sampling_name(sampled),
            "trials": trials,
            "equal": trials - differences,
            "outcome": "equal" if not differences else "cannot tell" if is_unknown else "differs",
            "upper_bound": round(upper_bound(differences, trials), 4),
            "forms": {form: {"differences": each.differences, "trials": each.trials} for form, each in forms.items()},
            "first_difference": asdict(first) if first else None,
        }


def overall_verdict(rows: Iterable[Row]) -> Verdict:
    """Returns the verdict over all rows. `not reproducible`: only control conditions showed differences."""
    differing = [row["condition"] for row in rows if row["outcome"] == "differs"]
    if not differing:
        return "exact"
    return "not reproducible" if set(differing) <= set(CONTROLS) else "differences"


@dataclass(frozen=True)
class RecognizedEngine:
    """The engine behind an endpoint. None: unknown."""

    name: str | None = None
    version: str | None = None
    slots: int | None = None  # requests that llama.cpp runs at a time
    faults: Seq[dict[str, Any]] = ()  # documented causes of inexactness (known_engines.json)


def recognize_engine(server: Server, model: dict[str, Any]) -> RecognizedEngine:
    """Recognizes the engine by the owner of `model`, an entry of /v1/models, and reads its version."""
    engines = read_packaged("headstart.tools.probe", "known_engines.json")
    engine = next((each for each in engines if each["owner"] == model.get("owned_by")), None)
    if engine is None:
        return RecognizedEngine()
    page = get_object(server, engine["page"])
    version, slots = page.get(engine["member"]), page.get("total_slots")
    version, slots = version if isinstance(version, str) else None, slots if isinstance(slots, int) else None
    return RecognizedEngine(engine["name"], version, slots, engine.get("faults", ()))


@dataclass
class ExactnessResult:
    engine: RecognizedEngine
    comparisons: Comparisons = field(default_factory=Comparisons)
    untested: list[tuple[str, str]] = field(default_factory=list)  # (condition or form, reason)
    notes: list[str] = field(default_factory=list)

    def document(self, options: dict[str, Any]) -> dict[str, Any]:
        untested = dict.fromkeys(what for what, _ in self.untested)
        rows = self.comparisons.results()
        rows = [row for row in rows if row["equal"] < row["trials"] or row["condition"] not in untested]
        verdict = overall_verdict(rows)
        differing = {row["condition"] for row in rows if row["outcome"] == "differs"}
        return {
            "ok": verdict == "exact", "verdict": verdict, **options, "engine": self.engine.name,
            "version": self.engine.version, "confidence": CONFIDENCE, "conditions": rows,
            "not_tested": [{"what": what, "why": why} for what, why in dict.fromkeys(self.untested)],
            "notes": self.notes,
            "known_faults": [{**each, "seen": bool(differing & {*each["conditions"]})} for each in self.engine.faults],
            "summary": _summary(rows),
        }  # fmt: skip


def _summary(rows: Seq[Row]) -> str:
    verdict, compared = overall_verdict(rows), sum(row["trials"] for row in rows)
    if verdict == "exact":
        sure = f"a rate above {upper_bound(0, compared):.1%} would have shown, {CONFIDENCE:.0%} sure"
        return f"EXACT: none of {compared} answers differs; {sure}"
    differing = [row for row in rows if row["outcome"] == "differs"]
    parts = [f"{row['means']} ({row['sampling']} {row['trials'] - row['equal']} of {row['trials']})"
             for row in differing if row["condition"] not in CONTROLS]  # fmt: skip
    sentences = [f"DIFFERENCES: {', '.join(parts)}"] if parts else []
    if controls := dict.fromkeys(row["sampling"] for row in differing if row["condition"] in CONTROLS):
        which = " and ".join(controls)
        why = "; is the seed heeded?" if which == "sampled" else ""
        sentences.append(f"NOT REPRODUCIBLE: {which} answers differ when asked twice alone{why}")
    return ". ".join(sentences)


def lines_of(data: dict[str, Any]) -> list[str]:
    lines = []
    for row in data["conditions"]:
        if (place := row["first_difference"]) is not None:
            token = "" if place["token"] is None else f", token {place['token']}"
            where = f"first difference at character {place['character']}{token} ({place['case']})"
            lines += [f"{row['means']}, {row['sampling']}: {where}"]
            lines += [f"    {place['one']!r}", f"    {place['other']!r}"]
    lines += [f"not tested: {each['what']}: {each['why']}" for each in data["not_tested"]]
    lines += data["notes"]
    if data["engine"]:
        lines.append(f"engine: {data['engine']}{' ' + data['version'] if data['version'] else ''}")
    for each in data["known_faults"]:
        lines.append(f"known{', seen here' if each['seen'] else ''}: {each['says']} ({each['source']})")
    return [*lines, data["summary"]]


def table(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns = ["condition", "sampling", "trials", "equal", "differ in", "rate below", "outcome"]
    rows = []
    for row in data["conditions"]:
        forms = [f"{form} {count['differences']}/{count['trials']}" for form, count in row["forms"].items()
                 if count["differences"]]  # fmt: skip
        counts = [row["means"], row["sampling"], str(row["trials"]), str(row["equal"]), ", ".join(forms) or "-"]
        rows.append([*counts, f"{row['upper_bound']:.1%}", OUTCOMES[row["outcome"]]])
    return columns, rows


OFF, DEEP = "off", "deep"
SWITCHES: dict[str, dict[str, dict[str, Any]]] = {
    "headstart": {OFF: {"speculation": {"mode": "off"}}, DEEP: {"speculation": {"mode": "auto", "depth": 3}}}
}
"""Engine whose requests can switch drafting off, or set a depth -> request fields for both."""
NUM_CONCURRENT = 8  # requests at a time in condition "company", fillers included
MAX_ROUNDS = 60
QUESTIONS: tuple[Question, ...] = ("asked", "other")


@dataclass(frozen=True, kw_only=True)
class ExactOptions(ProbedServer):
    """Options of `probe --exact`. At least one round is run, even if it takes longer than `minutes`."""

    against: str | None = None  # a server of the same model that does not draft
    max_tokens: int = 64
    minutes: float = 3.0
    rounds: int = MAX_ROUNDS
    seed: int | None = None  # of the prompts; None: random, so that no earlier run has filled the prefix cache


@dataclass(frozen=True)
class SoloTrial:
    """All answers to one request while nothing else ran."""

    case: RequestCase
    prompt: str
    seed: int
    cold: ProbeResponse
    warm: ProbeResponse
    again: ProbeResponse

    @property
    def texts(self) -> set[str]:
        return {self.cold.text, self.warm.text, self.again.text}


def run(options: ExactOptions, progress: Progress = no_progress) -> Report:
    """Compares answers under all conditions. `ok`: none differed. Raises UsageError for a server without text."""
    server = Server.at(options.url, options.api_key)
    model = find_model(server, options.model)
    result = ExactnessResult(recognize_engine(server, model))
    other = Server.at(options.against, options.api_key) if options.against else None
    other_model = str(find_model(other, options.model)["id"]) if other else ""
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed

    async def work() -> None:
        client = await ExactClient.connect(server, str(model["id"]), options.max_tokens, seed)
        against = await ExactClient.connect(other, other_model, options.max_tokens, seed) if other else None
        await ExactnessTrials(client, against, result, seed).run(options.minutes, options.rounds, progress)

    asyncio.run(work())
    data = result.document({"url": str(server), "against": str(other) if other else None, "model": model["id"],
                            "seed": seed, "max_tokens": options.max_tokens})  # fmt: skip
    return Report(data["verdict"] == "exact", data, lines_of(data))


class ExactnessTrials:
    def __init__(self, client: ExactClient, against: ExactClient | None, result: ExactnessResult, seed: int) -> None:
        self._client, self._against, self._result, self._seed = client, against, result, seed
        self._comparisons = result.comparisons
        self._switches: dict[str, dict[str, Any]] = {}
        self._num_cached = self._num_uncached = 0  # repeated prompts, by whether the server reports cached tokens
        self._num_refused = 0
        self._num_sampled = self._num_unlike_greedy = 0
        self._drafts_off = 0  # drafts of answers that should have none

    async def run(self, minutes: float, rounds: int, progress: Progress) -> None:
        """Runs up to `rounds` rounds within `minutes`. Raises UsageError if the server is lost in the first round."""
        begun, total = time.monotonic(), 60 * minutes
        if self._against is None:
            switches = SWITCHES.get(self._result.engine.name or "", {})
            self._switches = {name: each for name, each in switches.items() if await self._client.takes(**each)}
        clients = [each for each in (self._client, self._against) if each]
        before = [await each.metrics() for each in clients]
        number = -1
        try:
            for number in range(rounds):
                trials = []
                for case in self._client.cases:
                    spent = time.monotonic() - begun
                    if number and spent > total:
                        break
                    progress(round(min(spent, total)), max(1, round(total)), f"round {number + 1}: {case}")
                    if trial := await self._run_alone(case, number):
                        trials.append(trial)
                await self._run_concurrently(trials, number)
                if time.monotonic() - begun > total:
                    break
        except EndpointLost as lost:
            if not number:
                raise UsageError(str(lost), "see the server's log") from None
            self._result.untested.append(("the rest", str(lost)))
        if not self._comparisons.counts:
            raise UsageError(f"{self._client.endpoint.server} refused all that was to be compared", "is it too busy?")
        after = [await each.metrics() for each in clients]
        counted = [now.since(then) if now and then else None for now, then in zip(after, before, strict=True)]
        self._note_untested()
        self._note_drafting(*counted)

    async def _run_alone(self, case: RequestCase, number: int) -> SoloTrial | None:
        """Runs one trial without concurrent requests; None if the server refuses a request."""
        asked, other = (make_prompt(case, self._seed, number, which) for which in QUESTIONS)
        seed = request_seed(self._seed, number)
        try:
            cold = await self._client.ask(case, asked, seed)
            await self._client.ask(case, other, seed)
            warm, again = [await self._client.ask(case, asked, seed) for _ in range(2)]
            trial = SoloTrial(case, asked, seed, cold, warm, again)
            self._comparisons.add("again", case, warm, again)
            self._compare_cached(trial)
            await self._compare("streamed", trial, await self._client.ask(case, asked, seed, streamed=True))
            await self._compare_drafting(trial)
            if case.sampled and not self._num_unlike_greedy:
                greedy = await self._client.ask(RequestCase(case.form, False), asked, seed)
                self._num_sampled += 1
                self._num_unlike_greedy += greedy.text != warm.text
        except EndpointRefused:
            self._num_refused += 1
            return None
        return trial

    def _compare_cached(self, trial: SoloTrial) -> None:
        if trial.warm.cached == 0:
            self._num_uncached += 1
            return
        self._num_cached += bool(trial.warm.cached)
        self._comparisons.add("warm", trial.case, trial.cold, trial.warm)

    async def _compare_drafting(self, trial: SoloTrial) -> None:
        """Compares with the other server, or without one with requests that switch drafting off or set a depth."""
        if self._against is None:
            for name, fields in self._switches.items():
                answer = await self._client.ask(trial.case, trial.prompt, trial.seed, **fields)
                self._drafts_off += int(answer.drafts or 0) if name == OFF else 0
                await self._compare("drafting", trial, answer)
            return
        if trial.case not in self._against.cases:
            return
        first = await self._against.ask(trial.case, trial.prompt, trial.seed)
        if first.text not in trial.texts:  # its cache is cold, and its answers may differ from each other
            first, second = [await self._against.ask(trial.case, trial.prompt, trial.seed) for _ in range(2)]
            self._comparisons.add("there again", trial.case, first, second)
        await self._compare("drafting", trial, first)

    async def _compare(self, condition: Condition, trial: SoloTrial, answer: ProbeResponse) -> None:
        """Compares an answer with the trial's. Repeats the control after a difference: the cache may have changed."""
        known = (trial.cold, trial.again)
        if not self._comparisons.add(condition, trial.case, trial.warm, answer, known=known):
            one, other = [await self._client.ask(trial.case, trial.prompt, trial.seed) for _ in range(2)]
            self._comparisons.add("again", trial.case, one, other)

    async def _run_concurrently(self, trials: list[SoloTrial], number: int) -> None:
        """Sends all requests of a round at once, together with filler requests that take longer."""
        client, num_fillers = self._client, max(NUM_CONCURRENT - len(trials), 1)
        prompts = [make_filler(self._seed, number, place) for place in range(num_fillers)]
        fillers = [asyncio.create_task(client.fill(prompt, seed)) for seed, prompt in enumerate(prompts, 1)]
        tasks = [asyncio.create_task(client.ask(each.case, each.prompt, each.seed)) for each in trials]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*fillers, return_exceptions=True)
        for trial, answer in zip(trials, answers, strict=True):
            if isinstance(answer, EndpointRefused):
                self._num_refused += 1
            elif isinstance(answer, BaseException):
                raise answer
            else:
                await self._compare("company", trial, answer)

    def _note_untested(self) -> None:
        result = self._result
        result.untested += self._client.refusals
        if self._against is not None:
            result.untested += [(f"{what} at --against", why) for what, why in self._against.refusals]
        if result.engine.slots == 1:
            result.untested.append(("company", "the server runs one request at a time"))
        if self._num_uncached and not self._num_cached:
            result.untested.append(("warm", "the server had nothing of a prompt in its cache when it was asked again"))
        if self._num_refused:
            result.notes.append(f"{self._num_refused} trials were refused by the server, and are not counted")
        if self._num_sampled and not self._num_unlike_greedy:
            result.notes.append("temperature 1 gave the greedy text each time: does the server heed it?")

    def _note_drafting(self, here: EngineCounters | None, there: EngineCounters | None = None) -> None:
        """Notes whether one side drafted and the other did not, which the comparison needs."""
        result = self._result
        if self._against is None and not self._switches:
            why = "this server's requests cannot leave it out; --against URL names a second server, without drafting"
            result.untested.append(("drafting", why))
            return
        drafts = self._client.drafts
        if drafts is None and here is not None and here.known:
            drafts = int(here.drafts or here.drafted or 0)
        if drafts == 0:
            result.untested.append(("drafting", "the server drafted nothing"))
        elif drafts is None:
            result.notes.append("it is unknown whether the server drafts: it has no drafting metrics")
        else:
            result.notes.append(f"{drafts} drafts were made")
        if self._drafts_off or (there is not None and there.is_drafting):
            result.untested.append(("drafting", "it drafted on both sides"))
