"""Prompts that the model writes itself: what it says after the bare beginning of a user's turn (the idea of Xu et al.
2024, "Magpie"). They cover what the model knows best, without any prompts at hand."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Literal

from headstart.api import LLM
from headstart.core import SamplingParams
from headstart.train.generate import Prompt

Language = Literal["en", "any"]
KIND = "own"
PROMPT_TOKENS = 192
TEMPERATURE, TOP_P = 1.0, 0.95
SHORTEST, LONGEST = 12, 1500
"""Characters of a prompt that is kept."""
MOST_COMPRESSED = 0.35
"""Text that zlib makes smaller than this repeats itself."""

_MARK = "user-turn-mark"
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "the a an of to in is and for on with that this it as are be by from what how i you my your can or which "
        "write explain describe make create find give list",
    )
)


def user_turn(llm: LLM) -> list[int]:
    """Token ids up to where the user's first words would stand; a model without chat template begins anew, after what
    begins a text or, where nothing does, after what ends one."""
    if not llm.has_chat_template:
        return llm.encode("", raw=True) or sorted(llm.tokenizer.eos_ids)[:1]
    template = llm.model.checkpoint.chat_template()
    assert template is not None
    text = template.render([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    return llm.tokenizer.encode(text[: text.index(_MARK)], add_special=False)


def write_prompts(
    llm: LLM, first: int, count: int, seed: int, language: Language, enough: Callable[[], bool] = lambda: False
) -> Iterator[Prompt]:
    """Attempts number `first` to `first + count - 1`: the usable ones, the same for the same arguments. When `enough`
    says so, those that are still being written are given up."""
    ids = user_turn(llm)
    if not ids:
        return
    with llm.session() as session:
        order = {}
        for number in range(first, first + count):
            drawn = random.Random(f"{seed} own {number}").getrandbits(32)
            params = SamplingParams(max_tokens=PROMPT_TOKENS, temperature=TEMPERATURE, top_p=TOP_P, seed=drawn)
            request = llm.request(ids, params, depth=0)
            order[request.request_id] = number
            session.submit(request)
        texts = {}
        while session.running and not enough():
            for choice, delta in session.step():
                if delta.finish_reason == "stop":
                    texts[order[choice.request.request_id]] = choice.text.strip()
    for _, text in sorted(texts.items()):
        if usable(text, language):
            yield Prompt(({"role": "user", "content": text},), KIND, "own", "written by the model")


def usable(text: str, language: Language) -> bool:
    """Long enough, not a loop, free of broken characters, and of the language."""
    if not SHORTEST <= len(text) <= LONGEST or "\ufffd" in text:
        return False
    if any(ord(char) < 32 and char not in "\n\t" for char in text):
        return False
    raw = text.encode()
    if len(raw) > 200 and len(zlib.compress(raw)) < MOST_COMPRESSED * len(raw):
        return False
    words = re.findall(r"[a-z']+", text.lower())
    if language == "any":
        return True
    ascii_share = sum(char.isascii() for char in text) / len(text)
    return ascii_share > 0.95 and len(words) >= 3 and sum(word in _COMMON for word in words) >= 0.1 * len(words)


def fingerprint(prompt: Prompt) -> str:
    """Prompts that begin with the same words are taken as one."""
    return " ".join(re.findall(r"\w+", str(prompt.messages[-1]["content"]).lower())[:10])
