"""The server's answers as OpenAPI describes them; they are written by documents.py and replies.py."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    """Members that are named here are there; others may be."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class Error(Answer):
    """What was wrong. `code`: the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(Answer):
    """OpenAI's shape of every error."""

    error: Error


class Usage(Answer):
    """Tokens, the seed that repeats the text, and what drafting did."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    seed: int
    speculation: dict[str, Any]


class DraftedToken(Answer):
    """A token of a pass. `score`: how sure its drafter was, 0 to 1, in its own measure; null where it cannot say."""

    id: int
    text: str
    score: float | None


class PassToken(DraftedToken):
    """A token of the text; one that was not drafted has no score. Joined, their texts are the choice's before stop
    strings and parsers."""

    accepted: bool


class Pass(Answer):
    """What one pass of the model gave, in chunks only. `drafter`: who made its draft, null without one; `drafted` and
    `accepted` are what `usage.speculation` adds up: the text may end before an accepted token."""

    drafter: str | None
    drafted: int = Field(ge=0)
    accepted: int = Field(ge=0)
    tokens: list[PassToken]
    rejected: list[DraftedToken]


class TextChoice(Answer):
    """One text."""

    index: int = Field(ge=0)
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    speculation: list[Pass] | None = None


class TextCompletion(Answer):
    """Of /v1/completions; a stream's chunks have the same choices in pieces."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ChatMessage(Answer):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Answer):
    """One turn."""

    index: int = Field(ge=0)
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    speculation: list[Pass] | None = None


class ChatCompletion(Answer):
    """Of /v1/chat/completions; a stream's chunks have a delta in place of the message."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelEntry(Answer):
    """One name of the model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Answer):
    """Of /v1/models."""

    object: Literal["list"]
    data: list[ModelEntry]


class Tokenized(Answer):
    """Of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Answer):
    """Of /detokenize."""

    prompt: str
