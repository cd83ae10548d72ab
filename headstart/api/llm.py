"""`LLM`: a model with its engine in this process."""

import gc
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import numpy as np

from headstart.api.images import (
    EncodedPrompt,
    encode_images,
    per_prompt,
    require_image_processor,
    split_images,
    with_placeholders,
)
from headstart.api.session import Completion, Session, TextDelta, gather
from headstart.config import AUTO, EngineConfig, config_fields
from headstart.core import Progress, Request, SamplingParams, no_progress, token_mask
from headstart.engine.build import build_engine, change_head, identity
from headstart.engine.calibrate import known_costs
from headstart.engine.load import Model, load_model, with_head
from headstart.engine.shared import SharedEngine
from headstart.errors import ModelError, ParameterError, UsageError, did_you_mean, quoted
from headstart.hub import chat_sampling
from headstart.params import parameters, recommended
from headstart.text.chat import ChatTemplate
from headstart.text.conversation import Conversation
from headstart.text.grammar_spec import GrammarSpec, with_subschemas
from headstart.text.image_prompt import ImageProcessor
from headstart.wording import errors_with_keywords

if TYPE_CHECKING:
    from headstart.text.grammar import GrammarCompiler

Message = Mapping[str, Any]
Prompt = str | Seq[int] | Seq[Message]  # a user message (or raw text), token ids, or chat messages
Constraint = GrammarSpec | Mapping[str, Any] | type
"""A GrammarSpec, a JSON schema, or a Pydantic model class that the text must fit. Objects of a Pydantic model get no
keys besides its fields, unless its config has extra="allow"."""

JSON_SAFE_BITS = 53  # size of drawn seeds: JSON readers that store numbers as doubles keep them exact


def make_config(config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    """`config` (None: defaults) with the fields in `options` replaced. Raises UsageError for an unknown field."""
    for name in options:
        if name not in config_fields():
            hint = did_you_mean(name, config_fields()) or "EngineConfig lists all options"
            raise UsageError(f"LLM has no option {name!r}", hint)
    if not isinstance(config, EngineConfig | None):
        raise UsageError(f"config is {quoted(config)}", "give EngineConfig(...), or options by name: LLM(depth=2)")
    if isinstance(adapters := options.get("lora"), Mapping):
        options = {**options, "lora": tuple(f"{name}={path}" for name, path in adapters.items())}
    elif isinstance(adapters, str | os.PathLike):
        options = {**options, "lora": (os.fspath(adapters),)}
    return replace(config or EngineConfig(), **options)


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `chat` and `stream`, which apply to each text."""

    raw: bool  # a text is the prompt itself, not a user message
    depth: int | None  # tokens drafted; 0: none; None: the depth of the LLM
    constraint: Constraint | None


def as_grammar(constraint: Constraint | None) -> GrammarSpec | None:
    """The GrammarSpec of a constraint. Raises UsageError for a value of another type than Constraint."""
    if constraint is None or isinstance(constraint, GrammarSpec):
        return constraint
    if isinstance(constraint, Mapping):
        return GrammarSpec("json_schema", constraint)
    if hasattr(constraint, "model_json_schema"):
        return GrammarSpec("json_schema", _without_extra_keys(constraint.model_json_schema()))
    hint = "give a JSON schema, a pydantic model or a GrammarSpec(kind, value)"
    raise UsageError(f"constraint is {constraint!r}", hint)


def _without_extra_keys(schema: Any) -> Any:
    """A Pydantic model's schema with `additionalProperties` false where an object schema does not set it."""
    if not isinstance(schema, Mapping):
        return schema
    found = with_subschemas(schema, _without_extra_keys)
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), Mapping)
    return {**found, "additionalProperties": schema.get("additionalProperties", False)} if is_object else found


def _one_per_prompt(values: Any, prompts: Seq[Any], what: str) -> list[Any]:
    """A value for each prompt. values: one for all, or a sequence. Raises UsageError for another number of values."""
    if isinstance(values, str) or not isinstance(values, Seq):
        return [values] * len(prompts)
    if len(values) != len(prompts):
        raise UsageError(f"{len(prompts)} prompts, but {len(values)} {what}", "give one for all, or one for each")
    return list(values)


def _check_arguments(prompt: Prompt, params: Any, depth: Any, vocab_size: int, others: Iterable[str]) -> None:
    """Raises UsageError for arguments of `LLM.request` of wrong types, unknown token ids, and `others`: names of
    arguments that do not exist."""
    for name in others:
        belongs = name in parameters()
        known = ("params", "images", "lora", *RequestOptions.__annotations__)
        like = did_you_mean(name, known) or f"arguments are {', '.join(known)}"
        hint = f"give SamplingParams({name}=...)" if belongs else like
        raise UsageError(f"there is no argument {name!r}", hint)
    if not isinstance(params, SamplingParams):
        raise UsageError(f"params is {type(params).__name__}", "give SamplingParams(max_tokens=...), or nothing")
    if depth is not None and (not isinstance(depth, Integral) or isinstance(depth, bool)):
        raise UsageError(f"depth {depth!r} is no number", "leave it out for the depth of the LLM")
    if isinstance(prompt, str) and not prompt:
        raise UsageError("the prompt is empty", "give at least one character")
    for name in [row.name for row in parameters().values() if row.kind in ("token_ids", "token_numbers")]:
        if unknown := [token for token in getattr(params, name) or () if not 0 <= token < vocab_size]:
            raise ParameterError(name, f"names token {unknown[0]}, but ids end at {vocab_size - 1}")


def _checked_message(message: Message) -> Message:
    """The message with a text for the content None that calls of tools may have. Raises UsageError for a role or
    content of another type."""
    if message.get("content") is None and message.get("tool_calls"):
        message = {**message, "content": ""}
    for name, kind in (("role", str), ("content", str | list | tuple)):
        if not isinstance(value := message.get(name), kind):
            what = f"no {name}" if value is None else f"the {name} {quoted(value)}"
            raise UsageError(f"a message has {what}", 'give {"role": "user", "content": "Hi"}')
    return message


def _recommended(model: Model) -> dict[str, Any]:
    try:
        return recommended(model.checkpoint.generation_config)
    except UsageError as error:
        raise ModelError(f"generation_config.json of {model.name}: {error.message}", "mend it, or remove it") from error


class LLM:
    """A model with its engine. Raises ModelError or UsageError if the model cannot be loaded.

    Threads may share an LLM: their requests run in one batch, and each text is the same as alone.
    model: path, Hub name or alias; None: the default model. LLMs may share a loaded `Model`; their passes take turns.
    progress: called with (done, total, description) while weights are read.
    cache_bytes: maximum bytes of the KV caches; they always hold at least one sequence.
    options: fields of EngineConfig by name, as in `LLM("model", depth=2, max_model_len=4096)`; `lora` may be the path
    of an adapter, or a dict of names and paths. Requests without a choice use the first. Errors name options by
    keyword; with a `config` and no options, by flag.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Model | None = None,
        config: EngineConfig | None = None,
        progress: Progress = no_progress,
        *,
        cache_bytes: int | None = None,
        **options: Any,
    ) -> None:
        started_s = time.perf_counter()
        if not isinstance(model, str | os.PathLike | Model | None):
            raise UsageError(f"model is {model!r}", "give a path, a Hub name or an alias")
        if not isinstance(cache_bytes, Integral | None):
            raise UsageError(f"cache_bytes is {cache_bytes!r}", "give a number of bytes")
        source = os.fspath(model) if isinstance(model, os.PathLike) else model
        self._by_keyword = config is None or bool(options)  # else options may come from a command line
        with self._named_errors():
            self.config = make_config(config, options)
            self.model = source if isinstance(source, Model) else load_model(source, self.config, progress)
            self.engine = build_engine(self.model, self.config, cache_bytes)
        self.shared = SharedEngine(self.engine, self._named_errors)
        if self.config.depth == AUTO and self.engine.drafting.drafter:
            self.engine.drafting.auto.costs = known_costs(self.engine, identity(self.model, self.config))
        self.tokenizer = self.model.tokenizer
        self.load_s = time.perf_counter() - started_s
        self.chat_template: ChatTemplate | None = self.model.checkpoint.chat_template()
        self.turn_end: tuple[str, ...] = ()  # stop string that ends an answer, from `use_chat_template`
        self.recommended = _recommended(self.model)
        self._ids = count()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def chat_sampling(self) -> dict[str, Any]:
        """Default sampling parameters of chats: the model's recommendations."""
        self._check_open()
        return {**chat_sampling(self.model.name), **self.recommended}

    @property
    def default_params(self) -> SamplingParams:
        """Sampling parameters of requests without any: those of generation_config.json, else greedy."""
        return SamplingParams(**self.recommended)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return "shared" not in self.__dict__

    def close(self) -> None:
        """Free the caches, and the weights if no other LLM shares the `Model`. Requests that other threads still run
        end with GenerationError. Later calls raise UsageError."""
        if self.closed:
            return
        self.shared.stop()
        if spill := self.engine.memory.spill:
            spill.close()
        del self.shared, self.engine, self.model
        gc.collect()  # networks and runners are in reference cycles

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("this LLM is closed", "make another one")

    @property
    def adapters(self) -> dict[str, str]:
        """Name -> path of the loaded LoRA adapters."""
        self._check_open()
        return {name: adapter.path for name, adapter in self.engine.adapters.loaded.items()}

    def _named_errors(self) -> AbstractContextManager[None]:
        """Errors inside name options as the LLM's caller did: by keyword or by flag."""
        return errors_with_keywords(wanted=self._by_keyword)

    def load_adapter(self, name: str, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Load a LoRA adapter: a PEFT directory or a GGUF file. Requests may name it from then on. replace: it may take
        the name of a loaded adapter, which running requests still use. Raises ModelError for an adapter that does not
        fit the model, UsageError for a name in use."""
        self._check_open()
        engine = self.engine
        with self._named_errors():
            fitted = engine.adapters.fit(Path(path))
        self.shared.call(lambda: engine.adapters.add(name, fitted, engine.adapter_slots_in_use, replace=replace))

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Running requests still use it. Raises UsageError for an unknown name."""
        self._check_open()
        engine = self.engine
        self.shared.call(lambda: engine.adapters.remove(name, engine.adapter_slots_in_use))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("an LLM cannot be copied, pickled or sent to another process", "make one there")

    def change_head(self, path: str | None) -> None:
        """Draft with the head at `path` (None: the model's own) from the next step on. Outputs do not change. Must be
        called in the engine's thread. Raises UsageError or ModelError, and then keeps the old head."""
        self._check_open()
        with self._named_errors():
            config = replace(self.config, head=path)
            model = with_head(self.model, config)
            change_head(self.engine, model, config)
        self.model, self.config = model, config

    @property
    def method(self) -> str:
        """The drafter's name; "none" without a drafter."""
        self._check_open()
        return self.engine.drafting.method

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def use_chat_template(self, template: ChatTemplate) -> None:
        """Replace the chat template. Its `turn_end` becomes an end-of-text id if it is a special token, else a stop."""
        bos, end = self.tokenizer.bos_id, template.turn_end
        begins = bos in self.tokenizer.encode("", add_special=True)
        tokens = {} if bos is None or (end and not begins) else {"bos_token": self.tokenizer.token_text(bos)}
        own = self.chat_template.tokens if self.chat_template and not end else {}
        self.chat_template = template.with_tokens(tokens | dict(own))
        token = self.tokenizer.id_of(end)
        if token is not None and token in self.tokenizer.special_ids:
            self.tokenizer.eos_ids |= {token}
        elif end:
            self.turn_end = (end,)

    @property
    def info(self) -> dict[str, Any]:
        """Names and sizes of model, drafter and context, for logs and /v1/models."""
        self._check_open()
        head = self.model.head
        return {
            "model": self.model.name,
            "backend": self.model.backend.name,
            "drafter": self.method,
            "head": head.source if head and self.method == head.spec.kind else None,
            "depth": self.engine.drafting.depth if self.engine.drafting.drafter else 0,
            "draft_vocab": self.engine.drafting.num_vocab,
            "context": self.engine.max_length,
            **({"synthetic_acceptance": list(synthetic.rates)} if (synthetic := self.engine.synthetic) else {}),
        }

    @property
    def image_processor(self) -> ImageProcessor | None:
        """Preprocessing of images for the model; None: it reads text only."""
        self._check_open()
        return self.model.image_processor

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt (see `encode_prompt`)."""
        return self.encode_prompt(prompt, raw=raw).ids

    def encode_prompt(self, prompt: Prompt, images: Seq[Any] = (), *, raw: bool = False) -> EncodedPrompt:
        """A prompt as token ids, with its images. A text becomes a user message in the chat template, unless `raw` is
        true or there is no template. `images`: images before a text, or of the placeholders in it. Raises UsageError
        for anything but text, token ids or messages, and for wrong images."""
        if isinstance(prompt, str) and not raw and self.chat_template is not None:
            parts = [*({"type": "image", "image": each} for each in images), {"type": "text", "text": prompt}]
            prompt, images = [{"role": "user", "content": parts}], ()
        ids, text, sources = self._encode_text(prompt, len(images))
        if sources and images:
            raise UsageError("images and messages with images are both given", "put all images into the messages")
        if not (sources or images):
            return EncodedPrompt(ids, text)
        processor = require_image_processor(self.model)
        return encode_images(processor, (ids, text), sources or images, self.engine.max_length)

    def _encode_text(self, prompt: Prompt, num_images: int) -> tuple[list[int], str, list[Any]]:
        """Token ids, with placeholders, and text of a prompt, and the images of its messages."""
        if isinstance(prompt, str):
            text = prompt
            if num_images:
                text = with_placeholders(require_image_processor(self.model), prompt, num_images)
            return self.tokenizer.encode(text, add_special=True), text, []
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray):
            hint = "give a text, token ids or messages, in a list: generate([[1, 2, 3]]); or chat(messages)"
            raise UsageError(f"a prompt is {prompt!r}", hint)
        parts = list(prompt)
        ids = [int(part) for part in parts if isinstance(part, int | np.integer)]
        if len(ids) == len(parts):
            return ids, "", []
        messages = [part for part in parts if isinstance(part, Mapping)]
        if len(messages) < len(parts):
            hint = "give a text, a list of ids, or a list of messages, which is what chat(messages) takes"
            raise UsageError("a prompt is neither token ids nor messages", hint)
        messages = [_checked_message(each) for each in messages]
        if self.chat_template is None:
            raise UsageError(f"{self.model.name} has no chat template", "give a text, which it continues")
        shown, sources = split_images(messages)
        if sources:
            require_image_processor(self.model)  # before a template that takes no images complains
        return *Conversation(shown).encode(self.chat_template, self.tokenizer), sources

    @cached_property
    def grammars(self) -> "GrammarCompiler":
        """The compiler of constraints. Its first use loads llguidance."""
        from headstart.text.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.model.config.vocab_size)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        depth: int | None = None,
        constraint: Constraint | None = None,
        lora: str | None = None,
        images: Seq[Any] = (),
        **others: Any,
    ) -> Request:
        """The engine request for a prompt. Draws a seed if none is set. With a constraint, the grammar decides where
        the text may end: ignore_eos has no effect, and min_tokens yields to it. params: None: `default_params`. lora:
        name of a loaded adapter; "": the model as it is; None: the first adapter of the config. Raises UsageError for
        wrong values."""
        self._check_open()
        params = self.default_params if params is None else params
        size, spec = self.model.config.vocab_size, as_grammar(constraint)
        _check_arguments(prompt, params, depth, size, others)
        seeds = params.seed, self.config.seed
        allowed, stop_ids = params.allowed_token_ids, self._stop_ids(params, is_constrained=spec is not None)
        if lora is None:
            lora = next((name for name, _ in self.config.adapters), "")
        with self._named_errors():
            adapter = self.engine.adapters.find(lora) if lora else None
            encoded = self.encode_prompt(prompt, images, raw=raw)
        return Request(
            request_id=f"request-{next(self._ids)}",
            prompt_ids=tuple(encoded.ids),
            images=encoded.images,
            params=params,
            seed=next((seed for seed in seeds if seed is not None), secrets.randbits(JSON_SAFE_BITS)),
            stop_ids=stop_ids,
            banned_until_min=stop_ids if params.min_tokens else frozenset(),
            banned=self._banned(params.bad_words),
            allowed=None if allowed is None else token_mask(allowed, size),
            depth=None if depth is None else int(depth),  # integers of numpy overflow
            constraint=None if spec is None else self.grammars.compile(spec),
            adapter=adapter,
        )

    def stream_request(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Request:
        """`request` for a stream. Raises UsageError for n other than 1, too."""
        request = self.request(prompt, params, **options)
        if request.params.n != 1:
            raise UsageError(f"n is {request.params.n}, but only one choice can be streamed")
        return request

    def _stop_ids(self, params: SamplingParams, *, is_constrained: bool) -> frozenset[int]:
        """Tokens that end the text. Raises UsageError if min_tokens cannot be reached without them."""
        ends = frozenset() if params.ignore_eos and not is_constrained else self.tokenizer.eos_ids
        stop_ids, allowed = ends | frozenset(params.stop_token_ids), params.allowed_token_ids
        rest = self.model.config.vocab_size - len(stop_ids) if allowed is None else len(set(allowed) - stop_ids)
        if params.min_tokens and not is_constrained and rest <= 0:
            raise ParameterError("min_tokens", "cannot be reached: all allowed tokens end the text")
        return stop_ids

    def _banned(self, words: Seq[str]) -> dict[tuple[int, ...], frozenset[int]]:
        """All ids of a word but the last -> banned last ids. Words are banned as written and after a space."""
        banned: dict[tuple[int, ...], frozenset[int]] = {}
        for text in (spelled for word in words for spelled in (word, f" {word.lstrip()}")):
            *before, last = self.tokenizer.encode(text, parse_special=False)
            banned[tuple(before)] = banned.get(tuple(before), frozenset()) | {last}
        return banned

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        images: Seq[Any] | None = None,
        lora: str | Seq[str] | None = None,
        on_finish: Callable[[int, Completion], None] | None = None,
        abort: threading.Event | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Complete all prompts in one continuous batch; returns completions in the order of the prompts.

        images: images of a single prompt (paths, bytes, Pillow images), or a list of them for each prompt.
        lora: name of a loaded adapter, or one for each prompt (see `request`). on_finish(index, completion): called
        when a prompt's choices are complete. abort: once set, running prompts end,
        and only finished completions are returned. options: see RequestOptions. Raises UsageError for a wrong prompt
        before any prompt runs, GenerationError if a text breaks off.
        """
        is_single = isinstance(prompts, str)
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Seq):
            raise UsageError(f"prompts is {type(prompts).__name__}", "give a text or a list: generate([prompt])")
        chosen = _one_per_prompt(params, prompts, "sets of sampling parameters")
        loras = _one_per_prompt(lora, prompts, "names of adapters")
        each_images = per_prompt(images, prompts, is_single)
        requests = [
            self.request(prompt, each, images=some, lora=name, **options)  # type: ignore[arg-type]
            for prompt, each, some, name in zip(prompts, chosen, each_images, loras, strict=True)
        ]
        order = {request.request_id: index for index, request in enumerate(requests)}
        choices: list[list[Completion]] = [[] for _ in requests]
        for request, delta in self._run(requests, continues=options.get("raw", False)):
            if abort is not None and abort.is_set():
                break
            if delta.completion is None:
                continue
            index = order[request.request_id]
            choices[index].append(delta.completion)
            if len(choices[index]) == request.params.n and on_finish:
                on_finish(index, gather(choices[index]))
        return [gather(each) for each in choices if each]

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        lora: str | Seq[str] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """Answer one or several conversations, each a list such as `[{"role": "user", "content": "Hi"}]`. Content may
        have OpenAI's parts, images too. Other arguments, the result and errors are those of `generate`."""
        if isinstance(messages, str) or not isinstance(messages, Seq) or not messages:
            raise UsageError(f"messages is {messages!r}", 'give a list: chat([{"role": "user", "content": "Hi"}])')
        several = not isinstance(messages[0], Mapping)
        prompts: list[Any] = list(messages) if several else [messages]
        return self.generate(prompts, params, lora=lora, **options)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        images: Seq[Any] = (),
        lora: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[TextDelta]:
        """Yield one prompt's output piece by piece (n = 1). Closing the iterator aborts it. Raises as `generate`."""
        request = self.stream_request(prompt, params, images=images, lora=lora, **options)
        for _, delta in self._run([request], continues=options.get("raw", False)):
            yield delta

    def decode_pair(self, prompt: Prompt, params: SamplingParams, number: int) -> dict[bool, Completion]:
        """Completions of one prompt with drafting (key True) and without (False), for demo, tune and bench. An even
        `number` runs without drafting first, an odd one last, so that disturbances of the machine affect both alike."""
        self._check_open()
        completions = {}
        for drafting in (False, True) if number % 2 == 0 else (True, False):
            self.engine.drafting.clear()  # the first run's output must not serve the second as a draft
            completions[drafting] = self.generate([prompt], params, depth=None if drafting else 0)[0]
        return completions

    def session(self, *, continues: bool = False) -> Session:
        """A Session, which takes requests one by one. `continues`: outputs continue raw prompts, see TextOutput."""
        self._check_open()
        return Session(self.shared, self.tokenizer, self.load_s, continues=continues)

    def _run(self, requests: Seq[Request], *, continues: bool) -> Iterator[tuple[Request, TextDelta]]:
        """Submit all requests and yield their pieces until all have ended."""
        started = time.perf_counter()
        with self.session(continues=continues) as session:
            for request in requests:
                session.submit(request, started)
            while session.running:
                for choice, delta in session.step():
                    if delta.finish_reason is not None:
                        delta = replace(delta, completion=choice.completion())
                    yield choice.request, delta
