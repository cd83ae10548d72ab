"""OpenAI's completions and chat completions: endpoints, and responses as a whole or as chunks of a stream."""

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from headstart.core import TokenLogprob
from headstart.server.body_reader import CheckedRoute
from headstart.server.generation import ChoiceStep, GeneratedChoice, Generation, Json
from headstart.server.pipeline import ERRORS, respond
from headstart.server.renderer import RawJson, ResponseRenderer, compact_json, dump_json
from headstart.server.schema import ChatRequest, CompletionRequest, ResponseModel
from headstart.text.parsers import Content, Event, Reasoning, ToolCall

router = APIRouter(route_class=CheckedRoute)
FinishReason = Literal["stop", "length", "tool_calls"]


class Usage(ResponseModel):
    """Token counts, the seed that reproduces the text, and the drafting statistics."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    seed: int
    speculation: dict[str, Any]


class DraftedToken(ResponseModel):
    """A drafted token of a pass. `score`: the drafter's confidence from 0 to 1, on its own scale; null if unknown."""

    id: int
    text: str
    score: float | None


class PassToken(DraftedToken):
    """An output token of a pass; its `score` is null if it was not drafted. The joined texts are the choice's text
    before stop strings and parsers are applied."""

    accepted: bool


class PassReport(ResponseModel):
    """One pass of the model, in chunks only. `drafter` is null without a draft. `drafted` and `accepted` add up to the
    counts of `usage.speculation`; `tokens` may have fewer accepted tokens, if the text ends before them."""

    drafter: str | None
    drafted: int = Field(ge=0)
    accepted: int = Field(ge=0)
    tokens: list[PassToken]
    rejected: list[DraftedToken]


class OutputChoice(ResponseModel):
    """One output of a request, without its text."""

    index: int = Field(ge=0)
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    speculation: list[PassReport] | None = None


class TextChoice(OutputChoice):
    """One output of a completion."""

    text: str


class CompletionDocument(ResponseModel):
    """A response of either API, without its outputs."""

    id: str
    created: int
    model: str
    usage: Usage


class TextCompletion(CompletionDocument):
    """Response of /v1/completions. A stream's chunks have the same shape, with a piece of the text each."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatMessage(ResponseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = Field(description="Always null: required by OpenAI's schema.")
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(OutputChoice):
    """One output of a chat completion."""

    message: ChatMessage


class ChatCompletion(CompletionDocument):
    """Response of /v1/chat/completions. A stream's chunks have `delta` in place of `message`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


MANY_LOGPROBS = 2000  # a chunk with more prompt logprobs is built in a worker thread


class OpenAIRenderer(ResponseRenderer):
    """Shared by both APIs: server-sent events without names, the objects around choices, logprobs and token ids."""

    end = "data: [DONE]\n\n"
    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._options, self._tokenizer = generation.options, generation.tokenizer
        self._prompt_logprobs: dict[int, RawJson] = {}  # by the index of the prompt's first choice
        self._held: dict[int, ChoiceStep] = {}  # steps that wait for the prompt's logprobs, by choice

    def document(self) -> Json:
        choices = [self._whole_choice(choice) for choice in self.generation.choices]
        return {**self._head(self.object_name), "choices": choices, "usage": self.generation.usage()}

    def is_large(self, step: ChoiceStep) -> bool:
        carries_prompt = self._options.needs_prompt_logprobs and not step.choice.has_begun
        return carries_prompt and len(step.choice.prompt_logprobs) > MANY_LOGPROBS

    def render(self, step: ChoiceStep) -> list[str]:
        """The chunks for a step. If the response has prompt logprobs, a choice's chunks wait until these are complete,
        so that the split into chunks does not depend on how the prompt was computed."""
        ready, choice = [step], step.choice
        if self._options.needs_prompt_logprobs and not choice.has_begun:
            self._held.setdefault(choice.index, ChoiceStep(choice, "", [], [], None)).extend(step)
            known = [
                index for index, each in self._held.items()
                if len(each.choice.prompt_logprobs) >= len(each.choice.choice.request.prompt_ids) - 1
            ]  # fmt: skip
            ready = [self._held.pop(index) for index in known]
        counts: Json = {"usage": self.generation.token_counts()} if self._options.continuous_usage else {}
        return [self._chunk([each], counts) for step in ready for each in self._choice_chunks(step)]

    def finish(self) -> list[str]:
        return [self._chunk([], {"usage": self.generation.usage()})] if self._options.usage else []

    def _chunk(self, choices: list[Json], more: Json) -> str:
        return f"data: {dump_json({**self._head(self.chunk_name), 'choices': choices, **more})}\n\n"

    def _head(self, object_name: str) -> Json:
        generation = self.generation
        name = f"{self.id_prefix}-{generation.id}"
        return {"id": name, "object": object_name, "created": generation.created, "model": generation.model}

    @abstractmethod
    def _whole_choice(self, choice: GeneratedChoice) -> Json: ...

    @abstractmethod
    def _choice_chunks(self, step: ChoiceStep) -> list[Json]:
        """The choice object of each chunk for this step."""

    def _extras(self, step: ChoiceStep, *, is_first: bool) -> Json:
        document = self._ids(step.choice, step.token_ids, is_first=is_first)
        return document | {"speculation": step.passes} if step.passes else document

    def _ids(self, choice: GeneratedChoice, token_ids: Seq[int], *, is_first: bool) -> Json:
        document: Json = {}
        if self._options.token_ids:
            document["token_ids"] = list(token_ids)
        if self._options.token_ids and is_first:
            document["prompt_token_ids"] = list(choice.choice.request.prompt_ids)
        if self._options.prompt_logprobs and is_first:
            document["prompt_logprobs"] = self._logprobs_of_prompt(choice.first or choice)
        return document

    def _logprobs_of_prompt(self, first: GeneratedChoice) -> RawJson:
        """The `prompt_logprobs` list in vLLM's shape: per token an object of token id -> logprob and text, the prompt's
        own token first. Built once for all choices of a prompt."""
        if first.index not in self._prompt_logprobs:
            text = self._tokenizer.token_text
            pieces = ["null"]
            for entry in first.prompt_logprobs:
                pairs = dict([(entry.token, entry.logprob), *entry.top])
                facts = {token: {"logprob": value, "decoded_token": text(token)} for token, value in pairs.items()}
                pieces.append(compact_json({str(token): each for token, each in facts.items()}))
            self._prompt_logprobs[first.index] = RawJson(f"[{','.join(pieces)}]")
        return self._prompt_logprobs[first.index]

    def _token_name(self, token: int) -> str:
        return f"token_id:{token}" if self._options.tokens_as_ids else self._tokenizer.token_text(token)


class CompletionRenderer(OpenAIRenderer):
    """/v1/completions."""

    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def _whole_choice(self, choice: GeneratedChoice) -> Json:
        entries = [*self._echoed_logprobs(choice), *choice.choice.logprobs]
        logprobs = self._logprobs(choice, entries) if self._options.logprobs else None
        document = _choice(choice, {"text": choice.prompt + choice.choice.text}, logprobs, choice.finish_reason)
        return document | self._ids(choice, choice.choice.tokens, is_first=True)

    def _choice_chunks(self, step: ChoiceStep) -> list[Json]:
        choice, text, is_first = step.choice, step.text, not step.choice.has_begun
        logprobs: list[TokenLogprob | None] = [*choice.take_logprobs()]
        if is_first:
            choice.has_begun = True
            text = choice.prompt + text
            logprobs = [*self._echoed_logprobs(choice), *logprobs]
        extras = self._extras(step, is_first=is_first)
        if not (text or logprobs or step.finish_reason or any(extras.values())):
            return []
        shown = self._logprobs(choice, logprobs) if self._options.logprobs else None
        return [_choice(choice, {"text": text}, shown, step.finish_reason) | extras]

    def _echoed_logprobs(self, choice: GeneratedChoice) -> list[TokenLogprob | None]:
        """Logprobs of the echoed prompt's tokens (None for the first token); empty without echo or logprobs."""
        return [None, *choice.prompt_logprobs] if self._options.echo and self._options.logprobs else []

    def _logprobs(self, choice: GeneratedChoice, entries: Seq[TokenLogprob | None]) -> Json:
        """The `logprobs` object. None stands for the prompt's first token. Text offsets continue over all chunks."""
        tokens, values, tops, offsets = list[str](), list[float | None](), list[Json | None](), list[int]()
        for entry in entries:
            token = entry.token if entry else choice.choice.request.prompt_ids[0]
            tokens.append(self._token_name(token))
            offsets.append(choice.text_offset)
            choice.text_offset += len(self._tokenizer.token_text(token))
            values.append(entry.logprob if entry else None)
            tops.append(self._top_logprobs(entry) if entry else None)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top_logprobs(self, entry: TokenLogprob) -> Json:
        """Logprobs by token text: the most likely tokens, and the token itself."""
        top = {self._token_name(token): value for token, value in reversed(entry.top)}  # equal texts: the likeliest
        return {**dict(reversed(top.items())), self._token_name(entry.token): entry.logprob}


class ChatRenderer(OpenAIRenderer):
    """/v1/chat/completions."""

    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _whole_choice(self, choice: GeneratedChoice) -> Json:
        message = _message(choice.choice.text)
        if choice.parser is not None:
            message = self._parsed_message(choice)
        logprobs = self._logprobs(choice.choice.logprobs) if self._options.logprobs else None
        document = _choice(choice, {"message": message}, logprobs, choice.finish_reason)
        return document | self._ids(choice, choice.choice.tokens, is_first=True)

    def _parsed_message(self, choice: GeneratedChoice) -> Json:
        content, reasoning, calls = "", "", list[Json]()
        for event in choice.events:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, Reasoning):
                reasoning += event.text
            elif isinstance(event, ToolCall):
                calls.append(self._call(choice, event))
            else:
                calls[event.index]["function"]["arguments"] += event.text
        message = _message(content if content or not calls else None)
        if reasoning and self._options.reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message["tool_calls"] = calls
        return message

    def _choice_chunks(self, step: ChoiceStep) -> list[Json]:
        choice, is_first = step.choice, not step.choice.has_begun
        deltas: list[Json] = []
        if is_first:
            choice.has_begun = True
            deltas.append({"role": "assistant", "content": ""})
        if choice.parser is None and step.text:
            deltas.append({"content": step.text})
        deltas += [each for event in step.events if (each := self._event_delta(choice, event))]
        logprobs = choice.take_logprobs() if self._options.logprobs else []
        extras = self._extras(step, is_first=is_first)
        has_more = step.finish_reason or logprobs or any(extras.values())
        if has_more and (not deltas or "role" in deltas[-1]):  # the role's chunk carries nothing else
            deltas.append({})
        choices = [_choice(choice, {"delta": delta}, None, None) for delta in deltas]
        if choices:
            last = choices[-1]
            last["finish_reason"] = step.finish_reason
            if logprobs:
                last["logprobs"] = self._logprobs(logprobs)
            last |= extras
        return choices

    def _event_delta(self, choice: GeneratedChoice, event: Event) -> Json | None:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return _reasoning(event.text) if self._options.reasoning else None
        if isinstance(event, ToolCall):
            return {"tool_calls": [{"index": event.index, **self._call(choice, event)}]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    def _call(self, choice: GeneratedChoice, event: ToolCall) -> Json:
        if event.index == len(choice.call_ids):
            choice.call_ids.append(f"call_{self.generation.new_id()[:24]}")
        function = {"name": event.name, "arguments": ""}
        return {"id": choice.call_ids[event.index], "type": "function", "function": function}

    def _logprobs(self, entries: Seq[TokenLogprob]) -> Json:
        content = [
            self._token(each.token, each.logprob) | {"top_logprobs": [self._token(*pair) for pair in each.top]}
            for each in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        return {"token": self._token_name(token), "logprob": logprob, "bytes": list(self._tokenizer.token_bytes(token))}


def _message(content: str | None) -> Json:
    """Message of a chat completion."""
    return {"role": "assistant", "content": content, "refusal": None}


def _choice(choice: GeneratedChoice, content: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _reasoning(text: str) -> Json:
    """Reasoning under both names that clients read: DeepSeek's, and the newer one of vLLM and OpenRouter."""
    return {"reasoning_content": text, "reasoning": text}


@router.post("/v1/completions", responses=ERRORS, response_model=TextCompletion)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several texts."""
    return await respond(request, body, CompletionRenderer)


@router.post("/v1/chat/completions", responses=ERRORS, response_model=ChatCompletion)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """The next turn of a conversation."""
    return await respond(request, body, ChatRenderer)
