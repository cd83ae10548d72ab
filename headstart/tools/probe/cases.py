"""What `probe --exact` asks an endpoint: prompts that it has never seen, in four forms, greedy and sampled."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["short", "long", "schema", "tools"]
Question = Literal["asked", "other"]
FORMS: tuple[Form, ...] = ("short", "long", "schema", "tools")
SAMPLED = {"temperature": 1.0}
GREEDY = {"temperature": 0.0}
NUM_ITEMS = 28
"""Lines of a long prompt: several blocks of any prefix cache (vLLM has 128 tokens a block on a CPU)."""
_NAMES = """\
amber anchor basket bridge candle canyon cedar comet copper dragon ember falcon feather forest garden glacier harbor
hollow island jasmine kettle lantern lemon marble meadow mirror needle ocean orchid paper pebble pepper piano quartz
raven ribbon river saddle silver spiral spoon storm thunder timber tunnel velvet violin walnut willow winter"""
WORDS = tuple(_NAMES.split())
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "colour": {"type": "string", "enum": ["red", "green", "blue", "black", "white"]},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 8},
        "story": {"type": "string"},
    },
    "required": ["name", "colour", "numbers", "story"],
    "additionalProperties": False,
}
NOTE = "keep_note"
TOOL = {"type": "function", "function": {"name": NOTE, "description": "Keeps a note.", "parameters": SCHEMA}}
TOOL_CHOICES: tuple[Any, ...] = ("required", {"type": "function", "function": {"name": NOTE}}, "auto")
"""The first that a server takes is used: each leaves more to the server, or to a parser that not every one has."""
FIELDS: dict[Form, dict[str, Any]] = {
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "note", "strict": True, "schema": SCHEMA}}
    },
    "tools": {"tools": [TOOL], "tool_choice": TOOL_CHOICES[0]},
}


@dataclass(frozen=True)
class Case:
    """One kind of request. `sampled`: at temperature 1 with a seed; else greedy."""

    form: Form
    sampled: bool

    @property
    def sampling(self) -> str:
        return sampling_of(self.sampled)

    def __str__(self) -> str:
        return f"{self.form}, {self.sampling}"


def sampling_of(sampled: bool) -> str:
    return "sampled" if sampled else "greedy"


def prompt_of(case: Case, seed: int, trial: int, question: Question) -> str:
    """A text whose beginning belongs to this run, case and trial alone, so that no cache holds it; both questions share
    that beginning."""
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


def filler_of(seed: int, trial: int, place: int) -> str:
    """Something to do for the server beside what is compared."""
    drawn = random.Random(f"{seed} filler {trial} {place}")
    return f"Write a long letter about a {' and a '.join(drawn.sample(WORDS, 2))}."


def seed_of(seed: int, trial: int) -> int:
    """Of a sampled request; 31 bits, since some servers take no more."""
    return random.Random(f"{seed} seed {trial}").randrange(1, 2**31)


def _item(place: int, drawn: random.Random) -> str:
    name = f"{drawn.choice(WORDS)} {drawn.choice(WORDS)}"
    return f"{place}. {name}, {drawn.randrange(1000)} pieces, box {drawn.choice('ABCDE')}"
