"""Prompts to answers by our own engine: text that the model itself writes, which is what a head must learn to draft."""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headstart.api import LLM, Choice
from headstart.core import SamplingParams
from headstart.errors import UsageError
from headstart.train.data import Message, find_files
from headstart.train.shards import Shards

GREEDY_SHARE = 0.5
WARM = (0.7, 1.0)
"""The other half of the answers is drawn at temperatures in this range."""
ANSWER_TOKENS = 256
Ending = Literal["enough", "late"]
FIRST_TOGETHER = 4
"""Answers that a wave begins with; more with each that ends: a short run has some whole ones, not many beginnings."""
FEWEST_TOKENS = 4
"""Of an unfinished answer that is kept; shorter ones have nothing to learn from."""


@dataclass(frozen=True)
class Prompt:
    """One question with what came before it, and those of the same user that follow once it is answered."""

    messages: tuple[Message, ...]
    kind: str
    licence: str = ""
    source: str = ""
    later: tuple[str, ...] = ()

    def next(self, answer: str) -> Prompt:
        """The next question of the conversation, behind the model's own answer to this one."""
        said = ({"role": "assistant", "content": answer}, {"role": "user", "content": self.later[0]})
        return replace(self, messages=(*self.messages, *said), later=self.later[1:])

    @property
    def key(self) -> str:
        """Identity, for resuming."""
        return hashlib.sha256(json.dumps([dict(m) for m in self.messages], sort_keys=True).encode()).hexdigest()[:32]


def read_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """Lines {"prompt", "kind"?, "history"?, "source"?, "licence"?} of the files, or {"messages": [...]} or {"turns":
    [...]} with all that a user asks, one after the other: answers in the file give way to the model's own. Raises
    UsageError for a file without any."""
    prompts: list[Prompt] = []
    for path in find_files(paths):
        with path.open(encoding="utf-8", errors="replace") as lines:
            parsed = [prompt for line in lines if (prompt := _parse(line, path.stem))]
        if not parsed:
            raise UsageError(f"{path} holds no prompts", 'each line is {"prompt": "..."}')
        prompts += parsed
    return prompts


def _parse(line: str, default_kind: str) -> Prompt | None:
    try:
        data = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(data, dict):
        return None
    said, before = _objects(data.get("messages")), _objects(data.get("history"))
    asked: list[Any] = [data["prompt"]] if "prompt" in data else []
    if not asked and said:
        asked = [m.get("content") for m in said if m.get("role") == "user"]
        before = [m for m in said[:1] if m.get("role") == "system"]
    elif not asked and isinstance(data.get("turns"), list):
        asked = data["turns"]
    if not asked or not all(isinstance(each, str) and each.strip() for each in asked):
        return None
    kind = str(data.get("kind") or data.get("category") or default_kind)
    messages = (*before, {"role": "user", "content": asked[0]})
    source = str(data.get("source", default_kind))
    return Prompt(messages, kind, str(data.get("licence", "")), source, tuple(asked[1:]))


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def answer(
    llm: LLM,
    prompts: Sequence[Prompt],
    shards: Shards,
    *,
    seed: int = 0,
    max_tokens: int = ANSWER_TOKENS,
    wave: int = 512,
    done: Callable[[dict[str, Any]], None] = lambda record: None,
    until: Callable[[], Ending | None] = lambda: None,
) -> None:
    """Answer what `shards` do not hold yet, `wave` prompts to the engine at a time; `done` hears every new record.
    `until` is asked after each step. Where there is enough, answers in the making are dropped: a later run writes them
    whole. Where it is late they are kept as far as they have come. Prompts that do not fit into the context together
    with `max_tokens` are left out."""
    missing = _unanswered(prompts, shards)
    # neighbours of similar length finish prefill together; the order is the same in every run
    missing.sort(key=lambda prompt: (len(str(prompt.messages[-1]["content"])) // 256, prompt.key))

    def keep(prompt: Prompt, choice: Choice, reason: str) -> None:
        record = _record(prompt, choice, reason)
        shards.append(record)
        done(record)
        waiting.extend(_following(llm, prompt, choice, reason, max_tokens))

    for start in range(0, len(missing), wave):
        part = [p for p in missing[start : start + wave] if _fits(llm, p, max_tokens)]
        waiting, together, ended = deque(part), FIRST_TOGETHER, 0
        with llm.session() as session:
            asked = {}
            while (waiting or session.running) and not until():
                while waiting and len(session.running) < together:
                    prompt = waiting.popleft()
                    request = llm.request(_asked(llm, prompt), sampling(prompt, seed, max_tokens), depth=0)
                    asked[request.request_id] = prompt
                    session.submit(request)
                for choice, delta in session.step():
                    if delta.finish_reason is not None:
                        choice.completion(llm)  # raises for a text that broke off
                        keep(asked[choice.request.request_id], choice, delta.finish_reason)
                        ended += 1
                together = max(together, FIRST_TOGETHER + 2 * ended)
            if not (waiting or session.running):
                continue
            for choice in list(session.running.values()) if until() == "late" else []:
                if len(choice.tokens) >= FEWEST_TOKENS:
                    keep(asked[choice.request.request_id], choice, "length")
            return


def _unanswered(prompts: Sequence[Prompt], shards: Shards) -> list[Prompt]:
    """The first question of each conversation that has no answer yet."""
    answers: dict[str, str] = {}
    if any(prompt.later for prompt in prompts):
        whole = (record for record in shards if record["finish_reason"] == "stop")
        answers = {record["key"]: record["messages"][-1]["content"] for record in whole}
    open_ones = []
    for prompt in {p.key: p for p in prompts}.values():
        while prompt.later and prompt.key in answers:
            prompt = prompt.next(answers[prompt.key])
        if prompt.key not in shards.keys:
            open_ones.append(prompt)
    return open_ones


def _following(llm: LLM, prompt: Prompt, choice: Choice, reason: str, max_tokens: int) -> list[Prompt]:
    """The next question of a conversation, where an answer is whole and there is room for one more."""
    if not prompt.later or reason != "stop":
        return []
    following = prompt.next(choice.text)
    return [following] if _fits(llm, following, max_tokens) else []


def _asked(llm: LLM, prompt: Prompt) -> str | list[Message]:
    """Messages for the chat template; a base model continues the text of the last one."""
    return list(prompt.messages) if llm.has_chat_template else str(prompt.messages[-1]["content"])


def _fits(llm: LLM, prompt: Prompt, max_tokens: int) -> bool:
    return len(llm.encode(_asked(llm, prompt))) + max_tokens <= int(llm.info["context"])


def sampling(prompt: Prompt, seed: int, max_tokens: int) -> SamplingParams:
    """Temperature and seed follow from the prompt, so a resumed run draws what it would have drawn."""
    rng = random.Random(f"{seed} {prompt.key}")
    temperature = 0.0 if rng.random() < GREEDY_SHARE else round(rng.uniform(*WARM), 2)
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=rng.getrandbits(32))


def _record(prompt: Prompt, choice: Choice, reason: str) -> dict[str, Any]:
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
