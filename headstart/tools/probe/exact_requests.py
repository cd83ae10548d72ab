"""Requests of `probe --exact`: new prompts in four forms, greedy and sampled, and a client that sends them."""

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headstart.formats.json_object import read_packaged
from headstart.tools.client import CHAT, COMPLETIONS, Response, Server, read_counters
from headstart.tools.engine_metrics import EngineCounters
from headstart.tools.probe.endpoint import Endpoint, EndpointRefused

Form = Literal["short", "long", "schema", "tools"]
Question = Literal["asked", "other"]
FORMS: tuple[Form, ...] = ("short", "long", "schema", "tools")
SAMPLED = {"temperature": 1.0}
GREEDY = {"temperature": 0.0}
NUM_ITEMS = 28  # lines of a long prompt: several prefix cache blocks (vLLM has 128 tokens per block on a CPU)
TRY_TOKENS = 8  # max_tokens of requests that only test whether the server accepts them
DATA = read_packaged("headstart.tools.probe", "exact_requests.json")
WORDS: list[str] = DATA["words"]
SCHEMA: dict[str, Any] = DATA["note"]
NOTE = "keep_note"
TOOL = {"type": "function", "function": {"name": NOTE, "description": "Keeps a note.", "parameters": SCHEMA}}
TOOL_CHOICES: tuple[Any, ...] = ("required", {"type": "function", "function": {"name": NOTE}}, "auto")
"""Tool choices in order of preference; the first that a server accepts is used."""
FIELDS: dict[Form, list[dict[str, Any]]] = {
    "short": [{}],
    "long": [{}],
    "schema": [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "note", "strict": True, "schema": SCHEMA}}}
    ],
    "tools": [
        {"tools": [TOOL], "tool_choice": choice, **one}
        for one in ({"parallel_tool_calls": False}, {})
        for choice in TOOL_CHOICES
    ],
}
"""Form -> request fields, in order of preference."""


@dataclass(frozen=True)
class RequestCase:
    form: Form
    sampled: bool  # at temperature 1 with a seed; else greedy

    def __str__(self) -> str:
        return f"{self.form}, {sampling_name(self.sampled)}"


def sampling_name(sampled: bool) -> str:
    return "sampled" if sampled else "greedy"


def make_prompt(case: RequestCase, seed: int, trial: int, question: Question) -> str:
    """Returns a prompt that is new for each run, case and trial. Both questions have the same beginning."""
    drawn = random.Random(f"{seed} {case} {trial}")
    number = "".join(drawn.choices("0123456789", k=9))
    first, second, third = drawn.sample(WORDS, 3)
    if case.form == "long":
        items = "\n".join(_item(place, drawn) for place in range(1, NUM_ITEMS + 1))
        tasks = {"asked": "Write the list down again, word for word, and go on with more items of the same kind.",
                 "other": "How many items are there, and which one is the largest?"}  # fmt: skip
        return f"List {number}.\n{items}\n\n{tasks[question]}"
    tasks = {"asked": f"Tell a story about a {first}, a {second} and a {third}.",
             "other": f"What has a {third} to do with a {first}?"}  # fmt: skip
    if case.form != "short":
        tasks["asked"] = f"Note a {first}: its name, colour and numbers, and a story of a {second} and a {third}."
    return f"Number {number}. {tasks[question]}"


def _item(place: int, drawn: random.Random) -> str:
    name = f"{drawn.choice(WORDS)} {drawn.choice(WORDS)}"
    return f"{place}. {name}, {drawn.randrange(1000)} pieces, box {drawn.choice('ABCDE')}"


def make_filler(seed: int, trial: int, place: int) -> str:
    """Returns a prompt that keeps the server busy beside the compared requests."""
    drawn = random.Random(f"{seed} filler {trial} {place}")
    return f"Write a long letter about a {' and a '.join(drawn.sample(WORDS, 2))}."


def request_seed(seed: int, trial: int) -> int:
    """Returns the seed of a sampled request; 31 bits, since some servers take no more."""
    return random.Random(f"{seed} seed {trial}").randrange(1, 2**31)


@dataclass(frozen=True)
class ProbeResponse:
    """One answer. None: the server does not report the value."""

    text: str
    token_ids: tuple[int, ...] | None = None
    cached: int | None = None  # prompt tokens found in the prefix cache
    drafts: float | None = None  # drafts for this answer
    accepted: float | None = None  # drafted tokens
    tokens: int | None = None
    seconds: float = 0.0  # from the request to the end of the answer
    refused: bool = False  # `text` is the status and the message of a refusal


@dataclass
class ExactClient:
    """Sends requests to one server, in every form that the server accepts."""

    endpoint: Endpoint
    max_tokens: int
    fields: dict[Form, dict[str, Any]] = field(default_factory=dict)  # accepted form -> its request fields
    takes_seed: bool = False
    refusals: list[tuple[str, str]] = field(default_factory=list)  # (refused form, reason)
    drafts: int | None = None  # sum over all answers; None: the server does not report it

    @classmethod
    async def connect(cls, server: Server, model: str, max_tokens: int, seed: int) -> "ExactClient":
        """Tests each form once, and sampling with a seed. Raises UsageError for a server that gives no text."""
        optional = {"return_token_ids": True}
        endpoint = Endpoint(server, model, (CHAT, COMPLETIONS), optional=optional, chat_instruction="")
        client = cls(endpoint, min(max_tokens, TRY_TOKENS))
        short = RequestCase("short", False)
        await endpoint.ask(make_prompt(short, seed, -1, "asked"), client.max_tokens, **GREEDY)
        for form in FORMS:
            if len(FIELDS[form][0]) and endpoint.path == COMPLETIONS:
                client.refusals.append((form, "it has no chat"))
            else:
                await client._try_form(form, make_prompt(RequestCase(form, False), seed, -1, "other"))
        try:
            await client.ask(RequestCase("short", True), "Say something.", seed=1)
            client.takes_seed = True
        except EndpointRefused as refused:
            client.refusals.append(("sampled", str(refused)))
        client.max_tokens, client.drafts = max_tokens, None
        return client

    async def _try_form(self, form: Form, prompt: str) -> None:
        reasons = []
        for fields in FIELDS[form]:
            self.fields[form] = fields
            try:
                await self.ask(RequestCase(form, False), prompt, 1)
                return
            except EndpointRefused as refused:
                reasons.append(str(refused))
        del self.fields[form]
        self.refusals.append((form, reasons[0]))

    @property
    def cases(self) -> list[RequestCase]:
        samplings = (False, True) if self.takes_seed else (False,)
        return [RequestCase(form, sampled) for form in self.fields for sampled in samplings]

    async def metrics(self) -> EngineCounters | None:
        return await read_counters(self.endpoint.server)

    async def ask(
        self, case: RequestCase, prompt: str, seed: int, *, streamed: bool = False, counted: bool = False, **fields: Any
    ) -> ProbeResponse:
        """Sends a request with additional body `fields`. counted: drafts are read from the server's metrics if the
        answer does not report them; no other request may run. Raises EndpointRefused or EndpointLost."""
        body = self._body(prompt, case.sampled, seed) | self.fields.get(case.form, {}) | fields
        if streamed:
            body["stream"] = True
            body.pop("return_token_ids", None)  # a stream may split the ids differently
        before = await self.metrics() if counted else None
        found = self._read(await self.endpoint.post(body), streamed)
        if before is None or found.drafts is not None or (after := await self.metrics()) is None:
            return found
        spent = after.since(before)
        drafts, accepted = (spent.drafts, spent.accepted) if spent.known else (0.0, 0.0)
        return replace(found, drafts=drafts, accepted=accepted)

    async def takes(self, **fields: Any) -> bool:
        body = self._body("Say something.", False, 1) | {self.endpoint.length_field: TRY_TOKENS} | fields
        try:
            await self.endpoint.post(body)
        except EndpointRefused:
            return False
        return True

    async def fill(self, prompt: str, seed: int) -> None:
        """Keeps the server busy with an answer of twice `max_tokens`."""
        body = self._body(prompt, self.takes_seed, seed)
        await self.endpoint.post(body | {self.endpoint.length_field: 2 * self.max_tokens})

    def _body(self, prompt: str, sampled: bool, seed: int) -> dict[str, Any]:
        drawn = {**SAMPLED, "seed": seed} if sampled else GREEDY
        return self.endpoint.body(prompt, self.max_tokens, **drawn)

    def _read(self, answer: Response, streamed: bool) -> ProbeResponse:
        speculation = answer.usage.get("speculation") or {}
        drafts = speculation.get("drafts")
        if drafts is not None:
            self.drafts = (self.drafts or 0) + drafts
        ids = None if streamed else json.loads(answer.body)["choices"][0].get("token_ids")
        cached = (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return ProbeResponse(
            answer.text, tuple(ids) if ids else None, cached, drafts, speculation.get("accepted"),
            answer.usage.get("completion_tokens"), answer.seconds,
        )  # fmt: skip
