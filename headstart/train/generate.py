"""Text that the model writes itself: answers to prompts, and prompts of its own.

A head learns best from text of the model that it drafts for.
"""

import hashlib
import json
import random
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headstart.api import LLM, Choice
from headstart.core import Progress, SamplingParams
from headstart.errors import ModelError, UsageError
from headstart.train.flags import ANSWER_TOKENS, Language
from headstart.train.progress import print_line
from headstart.train.records import (
    Message,
    Shards,
    SkippedRecords,
    find_files,
    layout_hint,
    messages_of,
    question_of,
    read_json_lines,
)

GREEDY_SHARE = 0.5
TEMPERATURES = (0.7, 1.0)  # range of temperatures of the answers that are not greedy
MIN_CONCURRENT = 4
"""Answers in progress at the start of a wave. Each finished answer allows more, so that a short run finishes some."""
MIN_ANSWER_TOKENS = 4  # shorter unfinished answers are dropped: there is nothing to learn from them
EndReason = Literal["enough", "late"]
OWN_KIND = "own"
PROMPT_TOKENS = 192
TEMPERATURE, TOP_P = 1.0, 0.95
MIN_CHARACTERS, MAX_CHARACTERS = 12, 1500  # length of a usable prompt
MIN_COMPRESSED_SHARE = 0.35  # text that zlib compresses below this share repeats itself
_MARK = "user-turn-mark"
_COMMON = """
the a an of to in is and for on with that this it as are be by from what how i you my your can or which
write explain describe make create find give list
"""
_COMMON_WORDS = frozenset(_COMMON.split())


@dataclass(frozen=True)
class ConversationPrompt:
    """A question with the turns before it, and the same user's later questions."""

    messages: tuple[Message, ...]
    kind: str
    licence: str = ""
    source: str = ""
    later_questions: tuple[str, ...] = ()  # asked once the model has answered this one

    def next_prompt(self, answer: str) -> "ConversationPrompt":
        """The conversation's next question, after the model's own answer to this one."""
        turns = ({"role": "assistant", "content": answer}, {"role": "user", "content": self.later_questions[0]})
        return replace(self, messages=(*self.messages, *turns), later_questions=self.later_questions[1:])

    @property
    def key(self) -> str:
        """Identity, for resuming."""
        return hashlib.sha256(json.dumps([dict(m) for m in self.messages], sort_keys=True).encode()).hexdigest()[:32]


def read_prompts(paths: Sequence[Path]) -> list[ConversationPrompt]:
    """Prompts from JSONL lines {"prompt", "kind"?, "history"?, "source"?, "licence"?}, or {"messages": [...]} (also
    ShareGPT's conversations) or {"turns": [...]} with all questions of a user. Answers in the file are replaced by the
    model's own. Prints lines that are skipped. Raises UsageError for a file without prompts."""
    prompts: list[ConversationPrompt] = []
    for path in find_files(paths):
        parsed = list(read_json_lines(path, _parse_prompt, skipped := SkippedRecords()))
        if not parsed:
            hint = layout_hint(path, 'each line is {"prompt": "..."}')
            raise UsageError(f"{path} holds no prompts{skipped.example(path)}", hint)
        for line in skipped.lines():
            print_line(line)
        prompts += parsed
    return prompts


def _parse_prompt(data: Any, default_kind: str) -> ConversationPrompt:
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    messages, before = _dicts(messages_of(data)), _dicts(data.get("history"))
    asked = question_of(data)
    questions: list[Any] = [] if asked is None else [asked]
    if not questions and messages:
        questions = [m.get("content") for m in messages if m.get("role") == "user"]
        before = [m for m in messages[:1] if m.get("role") == "system"]
    elif not questions and isinstance(data.get("turns"), list):
        questions = data["turns"]
    if not questions:
        raise ValueError("has no question")
    if not all(isinstance(each, str) and each.strip() for each in questions):
        raise ValueError("a question is empty or no text")
    kind = str(data.get("kind") or data.get("category") or default_kind)
    first = (*before, {"role": "user", "content": questions[0]})
    source = str(data.get("source", default_kind))
    return ConversationPrompt(first, kind, str(data.get("licence", "")), source, tuple(questions[1:]))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def answer_prompts(
    llm: LLM, prompts: Sequence[ConversationPrompt], shards: Shards, *, seed: int = 0, max_tokens: int = ANSWER_TOKENS,
    wave: int = 512, on_record: Callable[[dict[str, Any]], None] = lambda record: None,
    should_end: Callable[[], EndReason | None] = lambda: None,
) -> None:  # fmt: skip
    """Answer the prompts that `shards` do not hold yet, `wave` prompts at a time. Prompts that do not fit into the
    context together with `max_tokens`, or that the chat template refuses, are named and left out.

    `should_end` is called after each step. At "enough", unfinished answers are dropped: a later run writes them in
    full. At "late", they are kept as they are.
    """
    missing = _unanswered(prompts, shards)
    # neighbours of similar length finish prefill together; the order is the same in every run
    missing.sort(key=lambda prompt: (len(str(prompt.messages[-1]["content"])) // 256, prompt.key))

    def keep(prompt: ConversationPrompt, choice: Choice, reason: str) -> None:
        record = _record(prompt, choice, reason)
        shards.append(record)
        on_record(record)
        following = [prompt.next_prompt(choice.text)] if prompt.later_questions and reason == "stop" else []
        waiting.extend(each for each in following if not _obstacle(llm, each, max_tokens))

    for start in range(0, len(missing), wave):
        part = _askable(llm, missing[start : start + wave], max_tokens)
        waiting, concurrent, ended = deque(part), MIN_CONCURRENT, 0
        with llm.session() as session:
            prompt_of = {}
            while (waiting or session.running) and not should_end():
                while waiting and len(session.running) < concurrent:
                    prompt = waiting.popleft()
                    params = sampling_params(prompt, seed, max_tokens)
                    request = llm.request(_model_input(llm, prompt), params, depth=0)
                    prompt_of[request.request_id] = prompt
                    session.submit(request)
                for choice, delta in session.step():
                    if delta.finish_reason is not None:
                        choice.completion()  # raises for a failed request
                        keep(prompt_of[choice.request.request_id], choice, delta.finish_reason)
                        ended += 1
                concurrent = max(concurrent, MIN_CONCURRENT + 2 * ended)
            if not (waiting or session.running):
                continue
            for choice in list(session.running.values()) if should_end() == "late" else []:
                if len(choice.tokens) >= MIN_ANSWER_TOKENS:
                    keep(prompt_of[choice.request.request_id], choice, "length")
            return


def answer_files(
    make_llm: Callable[[], LLM], paths: Sequence[Path], folder: Path, seed: int, progress: Progress
) -> None:
    """Answer the prompts in files that the shards in `folder` do not hold yet."""
    prompts = read_prompts(paths)
    finished = tokens = 0
    started = time.monotonic()

    def on_record(record: dict[str, Any]) -> None:
        nonlocal finished, tokens
        finished, tokens = finished + 1, tokens + len(record["response_ids"])
        rate = tokens / (time.monotonic() - started)
        progress(finished, len(prompts), f"answering prompts, {rate:.0f} tok/s")

    with Shards(folder, "answers") as shards:
        answer_prompts(make_llm(), prompts, shards, seed=seed, on_record=on_record)


def _unanswered(prompts: Sequence[ConversationPrompt], shards: Shards) -> list[ConversationPrompt]:
    """The first question of each conversation that has no answer yet."""
    answers: dict[str, str] = {}
    if any(prompt.later_questions for prompt in prompts):
        complete = (record for record in shards if record["finish_reason"] == "stop")
        answers = {record["key"]: record["messages"][-1]["content"] for record in complete}
    unanswered = []
    for prompt in {p.key: p for p in prompts}.values():
        while prompt.later_questions and prompt.key in answers:
            prompt = prompt.next_prompt(answers[prompt.key])
        if prompt.key not in shards.keys:
            unanswered.append(prompt)
    return unanswered


def _model_input(llm: LLM, prompt: ConversationPrompt) -> str | list[Message]:
    """Messages for the chat template; a base model continues the text of the last one."""
    return list(prompt.messages) if llm.has_chat_template else str(prompt.messages[-1]["content"])


def _askable(llm: LLM, prompts: Sequence[ConversationPrompt], max_tokens: int) -> list[ConversationPrompt]:
    """The prompts without an obstacle; prints lines about the others."""
    askable, skipped = [], SkippedRecords()
    for prompt in prompts:
        if why := _obstacle(llm, prompt, max_tokens):
            skipped.add(f"a prompt ({prompt.kind})", why)
        else:
            askable.append(prompt)
    for line in skipped.lines():
        print_line(line)
    return askable


def _obstacle(llm: LLM, prompt: ConversationPrompt, max_tokens: int) -> str:
    """Why a prompt cannot be asked; empty if it can."""
    try:
        num_tokens = len(llm.encode(_model_input(llm, prompt)))
    except (UsageError, ModelError) as error:  # of the chat template
        return error.message
    context = int(llm.info["context"])
    return "" if num_tokens + max_tokens <= context else f"it has no place in the context of {context} tokens"


def sampling_params(prompt: ConversationPrompt, seed: int, max_tokens: int) -> SamplingParams:
    """Temperature and seed depend on the prompt only, so that a resumed run samples the same."""
    rng = random.Random(f"{seed} {prompt.key}")
    temperature = 0.0 if rng.random() < GREEDY_SHARE else round(rng.uniform(*TEMPERATURES), 2)
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=rng.getrandbits(32))


def _record(prompt: ConversationPrompt, choice: Choice, reason: str) -> dict[str, Any]:
    return {
        "key": prompt.key,
        "kind": prompt.kind,
        "source": f"self-generated: {prompt.source}" if prompt.source else "self-generated",
        "licence": prompt.licence,
        "temperature": choice.request.params.temperature,
        "finish_reason": reason,
        "messages": [*prompt.messages, {"role": "assistant", "content": choice.text}],
        "prompt_ids": list(choice.request.prompt_ids),
        "response_ids": choice.tokens,
    }


def user_turn_ids(llm: LLM) -> list[int]:
    """Token ids up to a user's first word. A model without a chat template gets its begin or end token."""
    if not llm.has_chat_template:
        return llm.encode("", raw=True) or sorted(llm.tokenizer.eos_ids)[:1]
    template = llm.model.checkpoint.chat_template()
    assert template is not None
    text = template.render([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    return llm.tokenizer.encode(text[: text.index(_MARK)], add_special=False)


def write_prompts(
    llm: LLM, first: int, count: int, seed: int, language: Language, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[ConversationPrompt]:
    """Prompts that the model writes after the bare beginning of a user's turn (Xu et al. 2024, "Magpie").

    Yields the usable ones of the attempts `first` to `first + count - 1`; they are the same for the same arguments.
    When `should_stop` returns true, unfinished attempts are dropped.
    """
    ids = user_turn_ids(llm)
    if not ids:
        return
    ends = ("stop",) if llm.has_chat_template else ("stop", "length")  # a base model continues its own text
    with llm.session() as session:
        attempts = {}
        for number in range(first, first + count):
            drawn = random.Random(f"{seed} own {number}").getrandbits(32)
            params = SamplingParams(max_tokens=PROMPT_TOKENS, temperature=TEMPERATURE, top_p=TOP_P, seed=drawn)
            request = llm.request(ids, params, depth=0)
            attempts[request.request_id] = number
            session.submit(request)
        texts = {}
        while session.running and not should_stop():
            for choice, delta in session.step():
                if delta.finish_reason in ends:
                    texts[attempts[choice.request.request_id]] = choice.text.strip()
    for _, text in sorted(texts.items()):
        if is_usable(text, language):
            yield ConversationPrompt(({"role": "user", "content": text},), OWN_KIND, "own", "written by the model")


def is_usable(text: str, language: Language) -> bool:
    """Long enough, without repetition and broken characters, and in the language."""
    if not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS or "\ufffd" in text:
        return False
    if any(ord(char) < 32 and char not in "\n\t" for char in text):
        return False
    raw = text.encode()
    if len(raw) > 200 and len(zlib.compress(raw)) < MIN_COMPRESSED_SHARE * len(raw):
        return False
    words = re.findall(r"[a-z']+", text.lower())
    if language == "any":
        return True
    ascii_share = sum(char.isascii() for char in text) / len(text)
    return ascii_share > 0.95 and len(words) >= 3 and sum(word in _COMMON_WORDS for word in words) >= 0.1 * len(words)


def fingerprint(prompt: ConversationPrompt) -> str:
    """The first ten words: prompts that begin alike count as one."""
    return " ".join(re.findall(r"\w+", str(prompt.messages[-1]["content"]).lower())[:10])
