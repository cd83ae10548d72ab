"""A client for any OpenAI-compatible endpoint that keeps the time at which each piece of text came."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from headstart.errors import UsageError
from headstart.tools import engine_metrics
from headstart.tools.probe.traces import Kind, Trace

EXTRAS = {"ignore_eos": True, "seed": 1, "stream_options": {"include_usage": True}}
"""Fields that not every server knows; left out for one that refuses them."""
NEW_LENGTH = "max_completion_tokens"
"""What some servers want instead of max_tokens, and say so."""


@dataclass
class Client:
    """`url` with or without /v1. Raises UsageError where nothing answers."""

    url: str
    api_key: str | None = None
    model: str | None = None
    timeout: float = 120.0
    verify: bool = True  # certificates
    _path: str = "/v1/completions"
    _extras: dict[str, Any] = field(default_factory=lambda: dict(EXTRAS))
    _length: str = "max_tokens"
    _metrics_path: str | None = None

    def __post_init__(self) -> None:
        if "://" not in self.url:
            self.url = f"http://{self.url}"
        self.url = self.url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_keepalive_connections=0)  # llama.cpp closes idle connections
        try:
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=self.timeout, limits=limits, verify=self.verify
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise UsageError(f"{self.url} is not an address: {error}", "for example http://localhost:8000") from None
        if self.model is None:
            self.model = self._first_model()

    def close(self) -> None:
        self._http.close()

    def _first_model(self) -> str:
        response = self._get("/v1/models")
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            hint = "is it the address of an OpenAI-compatible server? --model NAME skips this question"
            raise UsageError(f"{self.url}/v1/models answers {response.status_code} and no models", hint) from None

    def _get(self, path: str) -> httpx.Response:
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise UsageError(f"{self.url} does not answer: {error}", "is the server running there?") from None
        if response.status_code in (401, 403):
            raise UsageError(f"{self.url} wants a key ({response.status_code})", "give --api-key")
        return response

    def metrics(self) -> engine_metrics.Counts | None:
        """What the server counts; None where it shows no metrics that are known."""
        for path in [self._metrics_path] if self._metrics_path else engine_metrics.PATHS:
            try:
                response = self._http.get(path, follow_redirects=True)
            except httpx.HTTPError:
                continue
            if response.status_code == 200 and (found := engine_metrics.read(response.text)):
                self._metrics_path = path
                return found
        return None

    def stream(self, kind: Kind, prompt: str, max_tokens: int, temperature: float) -> Trace:
        """One streamed answer. Text completions, or chat where there are none; unknown fields are left out."""
        while True:
            body, sent = self._body(prompt, max_tokens, temperature), time.perf_counter()
            try:
                with self._http.stream("POST", self._path, json=body) as response:
                    if response.status_code == 200:
                        return _read(response, kind, max_tokens, sent)
                    response.read()
            except httpx.HTTPError as error:
                raise UsageError(f"{self.url}{self._path} broke off: {error}", "see the server's log") from None
            self._try_another(response)

    def _try_another(self, response: httpx.Response) -> None:
        """Ask in another way the next time. Raises UsageError when there is none left."""
        if response.status_code == 400 and NEW_LENGTH in response.text and self._length != NEW_LENGTH:
            self._length = NEW_LENGTH
        elif response.status_code in (400, 422) and self._extras:
            named = [name for name in self._extras if name in response.text]
            for name in named or list(self._extras):
                del self._extras[name]
        elif response.status_code in (400, 404, 405, 422, 501) and self._path == "/v1/completions":
            self._path, self._extras = "/v1/chat/completions", dict(EXTRAS)
        else:
            said = response.text[:200]
            raise UsageError(f"{self.url}{self._path} answers {response.status_code}: {said}", "--model and --api-key?")

    def _body(self, prompt: str, max_tokens: int, temperature: float) -> dict[str, Any]:
        chat = {"messages": [{"role": "user", "content": f"Go on with this text, and write nothing else:\n{prompt}"}]}
        asked: dict[str, Any] = chat if "chat" in self._path else {"prompt": prompt}
        own = {"model": self.model, self._length: max_tokens, "temperature": temperature, "stream": True}
        return {**asked, **own, **self._extras}


def _read(response: httpx.Response, kind: Kind, max_tokens: int, sent: float) -> Trace:
    arrivals: list[float] = []
    tokens: int | None = None
    for when, line in _lines(response):
        if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
            continue
        try:
            event = json.loads(line[5:])
        except ValueError:
            continue
        if isinstance(usage := event.get("usage"), dict):
            tokens = usage.get("completion_tokens", tokens)
        for choice in event.get("choices") or ():
            part = choice.get("delta") or choice
            if part.get("text") or part.get("content") or part.get("reasoning_content"):
                arrivals.append(when - sent)
    return Trace(kind=kind, max_tokens=max_tokens, tokens=tokens, arrivals=tuple(arrivals))


def _lines(response: httpx.Response) -> Iterator[tuple[float, bytes]]:
    """Lines with the time at which their end came."""
    rest = b""
    for part in response.iter_raw():
        now = time.perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        yield from ((now, line.strip()) for line in lines)
