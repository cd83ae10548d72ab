"""`headstart gate`: is a new server or checkpoint as good as the old one?

Both sides answer the same prompts: twice alone, then all at once. A check of counts fails where the new side has fewer
hits, and so few or fewer have a chance below SIGNIFICANT under equal rates (Fisher's exact test, one-sided). It is not
judged where the old side has so few hits that even zero hits of the new side would not be significant. Tokens per pass
fail below a share of the old value, if the 95 % interval of the ratio lies below 1. Speed fails below a share of the
old value, if so many slower answers have a chance below SIGNIFICANT at equal speed (sign test). The expected rate of
equal texts is the rate at which the old side repeats its own. Prompts are new in each run, except against a baseline:
an engine whose cache holds a prompt may write other texts than one without it.
"""

import asyncio
import json
import math
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headstart.core import Progress, Report, no_progress
from headstart.errors import HeadstartError, UsageError
from headstart.files import read_text
from headstart.system import child_environment, free_port, stop_process_group
from headstart.tools.bench.summary import bootstrap_interval, draw_resamples, paired
from headstart.tools.client import Server, find_model, list_models
from headstart.tools.options import GateFlags
from headstart.tools.probe.endpoint import EndpointLost, EndpointRefused
from headstart.tools.probe.exact import DEEP, SWITCHES
from headstart.tools.probe.exact_requests import FORMS, SCHEMA, ExactClient, ProbeResponse, RequestCase, make_prompt
from headstart.tools.prompts import builtin_prompts
from headstart.tools.server_process import start_server

FORMAT = "headstart gate 2"
CONCURRENCY = 8  # requests of a side at a time
OBJECTS = {"schema": "valid JSON under a schema", "tools": "valid arguments of tool calls"}
OBJECT_TOKENS = 192  # least limit of answers that should be whole JSON objects
SIGNIFICANT = 0.01
MIN_SPEED = 0.95  # of the old speed


@dataclass(frozen=True, kw_only=True)
class GateOptions(GateFlags):
    seed: int = field(default_factory=lambda: secrets.randbelow(2**31))  # of the prompts


@dataclass(frozen=True)
class GateAnswer:
    """Answers of one side to one prompt."""

    kind: str  # form of the request, or "built-in"
    sampled: bool
    texts: tuple[str, str]  # asked twice, alone; of a refusal, its status and message
    company: str  # text when asked among CONCURRENCY requests
    tokens: int | None  # of the first answer; None: the server does not report the value
    seconds: float  # of the first answer
    accepted: float | None = None  # accepted drafted tokens; None: the server does not report the value
    refused: bool = False  # one of the answers alone was refused

    @property
    def is_repeated(self) -> bool:
        """Whether both answers alone have the same text."""
        return self.texts[0] == self.texts[1]

    @property
    def is_valid(self) -> bool:
        """Whether the first text is a JSON object with the members that the schema requires, or several: a client joins
        the arguments of tool calls."""
        rest, decoder = self.texts[0].strip(), json.JSONDecoder()
        try:
            while True:
                found, end = decoder.raw_decode(rest)
                if not isinstance(found, dict) or not set(SCHEMA["required"]) <= found.keys():
                    return False
                rest = rest[end:].lstrip()
                if not rest:
                    return True
        except ValueError:
            return False


@dataclass(frozen=True)
class GateRecord:
    """All answers of one side."""

    model: str  # name in the API
    max_tokens: int
    seed: int  # of the prompts
    answers: dict[str, GateAnswer]  # by prompt and sampling

    def data(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def read(cls, path: Path) -> "GateRecord":
        """Raises UsageError for a file that `--save` did not write."""
        from pydantic import TypeAdapter  # slow to import

        try:
            data = json.loads(read_text(path))
            if data["format"] != FORMAT:
                raise ValueError
            return TypeAdapter(cls).validate_python(data)
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{path} is no baseline of this version", "write one with headstart gate --save") from None


@dataclass(frozen=True)
class GateCheck:
    """One comparison. `ok` None: it could not be made."""

    name: str
    ok: bool | None
    old: str
    new: str
    note: str = ""
    kind: str = ""  # of the texts whose tokens per pass are compared; empty: another check
    lengths: tuple[float, float] | None = None  # tokens per pass of the old and the new side


def _count(name: str, old: Seq[bool], new: Seq[bool]) -> GateCheck:
    """Compares the shares of hits."""
    if not old or not new:
        return GateCheck(name, None, _share(old), _share(new), "one side has no such requests")
    if chance_of_fewer(sum(old), len(old), 0, len(new)) >= SIGNIFICANT:
        return GateCheck(name, None, _share(old), _share(new), "the old side has too few to notice a loss")
    chance = chance_of_fewer(sum(old), len(old), sum(new), len(new))
    note = "" if chance >= SIGNIFICANT else f"chance under equal rates: {chance:.1e}"
    return GateCheck(name, chance >= SIGNIFICANT, _share(old), _share(new), note)


def _text_changes(pairs: Seq[tuple[GateAnswer, GateAnswer]], allowed: bool) -> GateCheck:
    """Compares how often the new side gives a text of the old side with how often the old side repeats itself."""
    greedy = [pair for pair in pairs if not pair[0].sampled]
    repeated = [old.is_repeated for old, _ in greedy]
    same = [not {*old.texts}.isdisjoint(new.texts) for old, new in greedy]
    check = _count("same text as the old side, greedy", repeated, same)
    return replace(check, ok=None, note="changed, as allowed") if allowed and check.ok is False else check


def _share(hits: Seq[bool]) -> str:
    return f"{sum(hits)}/{len(hits)}" if hits else "-"


def chance_of_fewer(old_hits: int, old_trials: int, new_hits: int, new_trials: int) -> float:
    """Returns the chance of `new_hits` or fewer under equal rates: Fisher's exact test, one-sided."""
    hits, trials = old_hits + new_hits, old_trials + new_trials
    ways = sum(
        math.comb(new_trials, k) * math.comb(old_trials, hits - k)
        for k in range(max(0, hits - old_trials), new_hits + 1)
    )
    return ways / math.comb(trials, hits)


def chance_of_more(heads: int, tosses: int) -> float:
    """Returns the chance of `heads` or more among tosses of a fair coin."""
    ways: int = sum(math.comb(tosses, k) for k in range(heads, tosses + 1))
    return ways / (1 << tosses)


def run(options: GateOptions, progress: Progress = no_progress) -> Report:
    """Collects both sides and compares them; `ok`: no check failed. Raises UsageError."""
    baseline = GateRecord.read(Path(options.old)) if options.old.endswith(".json") else None
    if baseline:
        options = replace(options, max_tokens=baseline.max_tokens, seed=baseline.seed)
    sides = {"new": options.new} if baseline else {"old": options.old, "new": options.new}
    records = collect(sides, options, progress, baseline.model if baseline else None)
    old, new = baseline or records[0], records[-1]
    checks = compare(old, new, options, in_turns=baseline is None)
    failed = [check for check in checks if check.ok is False]
    summary = f"{'FAILED' if failed else 'PASSED'}: {len(failed)} of {len(checks)} checks failed"
    data = {
        "ok": not failed, "old": {"side": options.old, "model": old.model},
        "new": {"side": options.new, "model": new.model}, "max_tokens": options.max_tokens, "floor": options.floor,
        "checks": [asdict(check) for check in checks], "summary": summary, "record": new.data(),
    }  # fmt: skip
    return Report(not failed, data, [summary])


def compare(old: GateRecord, new: GateRecord, options: GateOptions, *, in_turns: bool = True) -> list[GateCheck]:
    """Makes all checks over the prompts that both sides answered. in_turns: both sides were asked in turns."""
    shared = [key for key in old.answers if key in new.answers]
    if not shared:
        raise UsageError("the two sides share no kind of request", "do both serve chats?")
    pairs = [(old.answers[key], new.answers[key]) for key in shared]
    sides = list(zip(*pairs, strict=True))
    checks = [_count(name, *([hit(each) for each in side] for side in sides)) for name, hit in COUNTED.items()]
    for kind, name in OBJECTS.items():
        checks.append(_count(name, *([each.is_valid for each in side if each.kind == kind] for side in sides)))
    checks.append(_text_changes(pairs, options.allow_text_changes))
    for kind in dict.fromkeys(old_answer.kind for old_answer, _ in pairs):
        checks.append(_acceptance(kind, [pair for pair in pairs if pair[0].kind == kind], options.floor))
    return [*checks, _acceptance("all", pairs, options.floor), _speed(pairs, in_turns)]


COUNTED: dict[str, Callable[[GateAnswer], bool]] = {
    "same text when asked twice": lambda each: each.is_repeated,
    "same text alone and in company": lambda each: each.company in each.texts,
}


def _acceptance(kind: str, pairs: Seq[tuple[GateAnswer, GateAnswer]], floor: float) -> GateCheck:
    """Compares tokens per pass over the prompts of a kind that both sides answered."""
    name = f"tokens per pass, {kind}"
    pairs = [pair for pair in pairs if not any(each.refused for each in pair)]
    if not pairs:
        return GateCheck(name, None, "-", "-", "one side refused each of these requests")
    if any(each.tokens is None or each.accepted is None for pair in pairs for each in pair):
        return GateCheck(name, None, "-", "-", "a server does not report accepted tokens")
    counts = np.array([[(each.tokens, each.accepted) for each in pair] for pair in pairs], np.float64)
    drawn = counts[draw_resamples(len(counts))].sum(1)  # [resamples, side, (tokens, accepted)]
    lengths, resampled = _lengths(counts.sum(0)), _lengths(drawn)
    ratio, (low, high) = lengths[1] / lengths[0], bootstrap_interval(resampled[:, 1] / resampled[:, 0])
    old, new = (f"{length:.2f}" for length in lengths)
    note = f"{ratio:.2f}x ({low:.2f} to {high:.2f})"
    return GateCheck(name, not (ratio < floor and high < 1), old, new, note, kind, tuple(lengths.tolist()))


def _lengths(counts: Any) -> Any:
    """[..., (tokens, accepted)] -> tokens per pass: each accepted token saves one."""
    return counts[..., 0] / np.maximum(counts[..., 0] - counts[..., 1], 1)


def _speed(pairs: Seq[tuple[GateAnswer, GateAnswer]], in_turns: bool) -> GateCheck:
    """Compares tokens/s of answers alone. The machine may have been another when a baseline was made: no verdict."""
    rates = [tuple((each.tokens or 0) / max(each.seconds, 1e-9) for each in pair) for pair in pairs]
    ratio = paired(tuple((one, other) for one, other in rates if one and other))
    if ratio is None:
        return GateCheck("speed, alone", None, "-", "-", "a server does not count tokens")
    old, new = (f"{float(np.median(side)):.1f} tokens/s" for side in zip(*rates, strict=True))
    if not in_turns:
        return GateCheck("speed, alone", None, old, new, f"{ratio}, measured at two times")
    slower = [new_rate < old_rate for old_rate, new_rate in rates if old_rate and new_rate]
    ok = ratio.point >= MIN_SPEED or chance_of_more(sum(slower), len(slower)) >= SIGNIFICANT
    return GateCheck("speed, alone", ok, old, new, f"{ratio}, {_share(slower)} slower")


def collect(
    sides: Mapping[str, str], options: GateOptions, progress: Progress, baseline: str | None = None
) -> list[GateRecord]:
    """Asks all sides (name -> URL or checkpoint) the same prompts, one side after the other for each prompt, so that
    a slow phase of the machine meets both. Raises UsageError for a side that is neither a server nor a checkpoint, for
    a model other than that of the baseline, and for a server that no longer answers."""
    for side in sides.values():
        _check_side(side)
    with ExitStack() as stack:
        servers = [Server.at(stack.enter_context(_served(side)), options.api_key) for side in sides.values()]
        models = [str(find_model(server, options.model)["id"]) for server in servers]
        if baseline and baseline != models[-1]:
            what = f"the baseline {options.old} is of model {baseline}, and {options.new} serves {models[-1]}"
            raise UsageError(what, "write a baseline of this model with --save")
        asked = list(zip(sides, servers, models, strict=True))
        try:
            return asyncio.run(_collect(asked, options, progress))
        except EndpointLost as lost:
            raise UsageError(str(lost), "see the server's log") from None


async def _collect(servers: Seq[tuple[str, Server, str]], options: GateOptions, progress: Progress) -> list[GateRecord]:
    prompts = gate_prompts(options.trials, options.seed)
    sides = [await GateSide.connect(name, server, model, prompts, options) for name, server, model in servers]
    for number, prompt in enumerate(prompts):
        progress(number, len(prompts), prompt.kind)
        for side in sides if number % 2 else sides[::-1]:
            await side.ask_alone(number)
    progress(len(prompts), len(prompts), "all at once")
    return [await side.record() for side in sides]


@dataclass(frozen=True)
class GatePrompt:
    """One request of the gate."""

    kind: str  # form of the request, or "built-in"
    case: RequestCase
    text: str


def gate_prompts(trials: int, seed: int) -> list[GatePrompt]:
    """`trials` prompts of each form, greedy and sampled, and the built-in ones. No prompt begins as that of another
    seed does."""
    return [
        GatePrompt(form, case, make_prompt(case, seed, trial, "asked"))
        for trial in range(trials)
        for form in FORMS
        for case in (RequestCase(form, False), RequestCase(form, True))
    ] + [
        GatePrompt("built-in", RequestCase("short", False), f"Number {seed}. {prompt}")
        for _, prompt in builtin_prompts()
    ]


@dataclass
class GateSide:
    """A server and its answers so far, by index of the prompt."""

    client: ExactClient
    prompts: Seq[GatePrompt]
    options: GateOptions
    salt: dict[str, Any]  # request fields that keep answers to other requests from being drafts
    deep: dict[str, Any]  # request fields of fixed drafting: depth auto drafts by the load of the machine
    alone: dict[int, tuple[ProbeResponse, ProbeResponse]] = field(default_factory=dict)

    @classmethod
    async def connect(
        cls, name: str, server: Server, model: str, prompts: Seq[GatePrompt], options: GateOptions
    ) -> "GateSide":
        client = await ExactClient.connect(server, model, options.max_tokens, options.seed)
        salt: dict[str, Any] = {"cache_salt": f"gate {name}"}
        deep = SWITCHES["headstart"][DEEP]
        taken = [each if await client.takes(**each) else {} for each in (salt, deep)]
        return cls(client, prompts, options, taken[0], taken[1])

    async def ask_alone(self, number: int) -> None:
        """Asks a prompt twice, if the server takes its form."""
        if self.prompts[number].case not in self.client.cases:
            return
        again = {name: f"{value} again" for name, value in self.salt.items()}
        first = await self._ask(number, counted=not self.deep, **self.salt)
        self.alone[number] = (first, await self._ask(number, counted=bool(self.deep), **self.deep, **again))

    async def record(self) -> GateRecord:
        """Asks all prompts again, CONCURRENCY at a time; returns all answers."""
        places = asyncio.Semaphore(CONCURRENCY)

        async def ask_concurrently(number: int) -> ProbeResponse:
            async with places:
                return await self._ask(number)

        concurrent = await asyncio.gather(*(ask_concurrently(number) for number in self.alone))
        answers = {
            f"{prompt.case.sampled:d} {prompt.text}": GateAnswer(
                prompt.kind, prompt.case.sampled, (one.text, other.text), together.text, one.tokens, one.seconds,
                (other if self.deep else one).accepted, one.refused or other.refused,
            )
            for prompt, (one, other), together in zip(
                [self.prompts[number] for number in self.alone], self.alone.values(), concurrent, strict=True
            )
        }  # fmt: skip
        return GateRecord(str(self.client.endpoint.model), self.options.max_tokens, self.options.seed, answers)

    async def _ask(self, number: int, counted: bool = False, **fields: Any) -> ProbeResponse:
        prompt = self.prompts[number]
        limit = max(self.options.max_tokens, OBJECT_TOKENS if prompt.kind in OBJECTS else 1)
        fields = {self.client.endpoint.length_field: limit, **fields}
        try:
            return await self.client.ask(prompt.case, prompt.text, number, counted=counted, **fields)
        except EndpointRefused as refused:  # for example with status 500 where it cannot parse its own answer
            return ProbeResponse(str(refused), refused=True)


def _is_address(side: str) -> bool:
    return "://" in side or side.startswith(("localhost:", "127.0.0.1:"))


def _check_side(side: str) -> None:
    """Raises UsageError for a side that is neither an address nor a checkpoint."""
    if _is_address(side):
        return
    from headstart.formats import find_checkpoint

    try:
        find_checkpoint(side)
    except HeadstartError as error:
        hint = "a side is http://HOST:PORT, a checkpoint, or (the old one) a file of --save"
        raise UsageError(f"{side!r} is no checkpoint: {error}", hint) from None


@contextmanager
def _served(side: str) -> Iterator[str]:
    """The URL of a side; a checkpoint is served by a process of its own meanwhile."""
    if _is_address(side):
        yield side
        return
    port = free_port()
    command = [sys.executable, "-m", "headstart", "serve", side, "--port", str(port), "--served-model-name", side]
    server = Server("127.0.0.1", port)

    def answers() -> bool:
        with suppress(UsageError):
            return bool(list_models(server))
        return False

    process = start_server(command, answers, child_environment())
    try:
        yield str(server)
    finally:
        stop_process_group(process)
