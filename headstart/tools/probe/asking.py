"""One endpoint, asked for whole answers: what it understands is found out first, and named where it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from headstart.errors import UsageError
from headstart.tools.client import Response, Server, counts, message, models, post, reason
from headstart.tools.engine_metrics import Counts
from headstart.tools.probe.cases import FIELDS, FORMS, GREEDY, SAMPLED, TOOL_CHOICES, Case, Form, prompt_of
from headstart.tools.probe.endpoint import CHAT, COMPLETIONS, NEW_LENGTH

OFF, DEEP = "off", "deep"
SWITCHES: dict[str, dict[str, dict[str, Any]]] = {
    "headstart": {OFF: {"speculation": {"mode": "off"}}, DEEP: {"speculation": {"mode": "auto", "depth": 3}}}
}
"""Engines whose requests can leave out drafting, or have more of it than they would get on a busy machine, and how."""
EXTRAS = {"return_token_ids": True}
"""Left out for a server that refuses them."""
TRY_TOKENS = 8
"""Tokens of the answers that are only looked at for whether there are any."""


class Refused(Exception):
    """The server answers, but not with a text: status and what it said."""


class Lost(Exception):
    """The server does not answer any more."""


@dataclass(frozen=True)
class Said:
    """One answer. None: the server does not tell. `cached`: prompt tokens that it had in its prefix cache; `drafts`:
    that it made for this answer."""

    text: str
    token_ids: tuple[int, ...] | None = None
    cached: int | None = None
    drafts: int | None = None


@dataclass
class Asker:
    """A server and how to ask it. `fields`: of each form that it takes; `refusals`: (what, why) of the others."""

    server: Server
    model: str
    max_tokens: int
    fields: dict[Form, dict[str, Any]] = field(default_factory=dict)
    takes_seed: bool = False
    refusals: list[tuple[str, str]] = field(default_factory=list)
    drafts: int | None = None  # of all answers so far, where they tell
    _path: str = CHAT
    _length: str = "max_tokens"
    _extras: dict[str, Any] = field(default_factory=lambda: dict(EXTRAS))

    @classmethod
    async def at(cls, server: Server, listed: dict[str, Any], max_tokens: int, seed: int) -> Asker:
        """`listed`: its entry of the model. Raises UsageError for a server that gives no text at all."""
        made = cls(server, str(listed["id"]), max_tokens)
        await made._learn(seed)
        return made

    @property
    def cases(self) -> list[Case]:
        """All that it can be asked."""
        return [Case(form, sampled) for form in self.fields for sampled in (False, True)[: 1 + self.takes_seed]]

    async def metrics(self) -> Counts | None:
        return await counts(self.server)

    async def ask(self, case: Case, prompt: str, seed: int, *, streamed: bool = False, **more: Any) -> Said:
        """One answer. Raises Refused and Lost; `more`: further fields of the body."""
        body = self._body(prompt, case.sampled, seed) | self.fields.get(case.form, {}) | more
        if streamed:
            body = {**body, "stream": True}
            body.pop("return_token_ids", None)  # pieces of a stream may have them split in other ways
        return self._said(await self._post(body), streamed)

    async def takes(self, **more: Any) -> bool:
        """Does it take these fields?"""
        try:
            await self._post(self._body("Say something.", False, 1) | {self._length: TRY_TOKENS} | more)
        except Refused:
            return False
        return True

    async def fill(self, prompt: str, seed: int) -> None:
        """Have it write twice as much as it is asked for elsewhere."""
        body = self._body(prompt, self.takes_seed, seed)
        await self._post(body | {self._length: 2 * self.max_tokens})

    def _body(self, prompt: str, sampled: bool, seed: int) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt": prompt}
        if self._path == CHAT:
            asked = {"messages": [{"role": "user", "content": prompt}]}
        drawn = {**SAMPLED, "seed": seed} if sampled else GREEDY
        return {"model": self.model, **asked, self._length: self.max_tokens, **drawn, **self._extras}

    async def _post(self, body: dict[str, Any]) -> Response:
        try:
            answer = await post(self.server, self._path, body)
        except (OSError, ValueError) as error:
            raise Lost(f"{self.server}{self._path}: {reason(error)}") from None
        if answer.broken:
            raise Lost(f"{self.server}{self._path} breaks off")
        if answer.status != 200:
            raise Refused(answer.status, message(answer.body))
        return answer

    def _said(self, answer: Response, streamed: bool) -> Said:
        usage = answer.usage
        drafts = (usage.get("speculation") or {}).get("drafts")
        if drafts is not None:
            self.drafts = (self.drafts or 0) + drafts
        ids = None if streamed else json.loads(answer.body)["choices"][0].get("token_ids")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Said(answer.text, tuple(ids) if ids else None, cached, drafts)

    async def _learn(self, seed: int) -> None:
        """Each form once, greedy, and a seed; what the first of them needs decides how all are asked."""
        full, self.max_tokens = self.max_tokens, min(self.max_tokens, TRY_TOKENS)
        await self._find_a_way(prompt_of(Case("short", False), seed, -1, "asked"))
        for form in FORMS:
            if form in FIELDS and self._path == COMPLETIONS:
                self.refusals.append((form, "it has no chat"))
                continue
            await self._try(form, prompt_of(Case(form, False), seed, -1, "other"))
        try:
            await self.ask(Case("short", True), "Say something.", seed=1)
            self.takes_seed = True
        except Refused as refused:
            self.refusals.append(("sampled", _told(refused)))
        self.max_tokens, self.drafts = full, None

    async def _find_a_way(self, prompt: str) -> None:
        """Raises UsageError when there is none."""
        while True:
            try:
                await self.ask(Case("short", False), prompt, 1)
                return
            except Lost as lost:
                raise UsageError(str(lost), "see the server's log") from None
            except Refused as refused:
                if not self._ask_otherwise(*refused.args):
                    hint = "--model and --api-key?"
                    raise UsageError(f"{self.server}{self._path} {_told(refused)}", hint) from None

    def _ask_otherwise(self, status: int, said: str) -> bool:
        if status == 400 and NEW_LENGTH in said and self._length != NEW_LENGTH:
            self._length = NEW_LENGTH
        elif status in (400, 422) and self._extras:
            self._extras = {}
        elif status in (400, 404, 405, 422, 500, 501) and self._path == CHAT:
            self._path, self._extras = COMPLETIONS, dict(EXTRAS)
        else:
            return False
        return True

    async def _try(self, form: Form, prompt: str) -> None:
        why = ""
        for choice in TOOL_CHOICES if form == "tools" else (None,):
            fields = dict(FIELDS.get(form, {}))
            if choice is not None:
                fields["tool_choice"] = choice
            self.fields[form] = fields
            try:
                await self.ask(Case(form, False), prompt, 1)
                return
            except Refused as refused:
                why = why or _told(refused)
        del self.fields[form]
        self.refusals.append((form, why))


def _told(refused: Refused) -> str:
    status, said = refused.args
    return f"answers {status}: {said}"


def entry_of(server: Server, name: str | None) -> dict[str, Any]:
    """The model of that name in /v1/models, or the first. Raises UsageError."""
    listed = models(server)
    found = next((each for each in listed if each["id"] == name), None) if name is not None else listed[0]
    if found is None:
        raise UsageError(f"{server} has no model {name!r}", f"it has {', '.join(each['id'] for each in listed[:8])}")
    return found
