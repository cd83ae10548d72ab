"""Workloads of a bench: built-in ones, which are generated from templates, and JSONL files."""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from headstart.errors import UsageError
from headstart.files import read_text
from headstart.formats.json_object import read_packaged

DEFAULT_TOKENS = 64  # default of the longest answer, in tokens
MIXED = ("code", "prose", "json", "repetitive")
SYNTHETIC_INPUT = 256  # tokens in a prompt of the workload "synthetic"
EACH = "each"  # FILE.jsonl:each
_SLOT = re.compile(r"\{([a-z_]+?)(\d?)\}")
_DATA: Mapping[str, Any] = read_packaged("headstart.tools.bench", "workloads.json")


@dataclass(frozen=True, kw_only=True)
class Task:
    """One conversation of a workload."""

    turns: tuple[str, ...]  # user messages; each is sent after the answer to the one before
    system: str = ""
    max_tokens: int = DEFAULT_TOKENS
    ignore_eos: bool = False  # true: answers have exactly max_tokens
    temperature: float = 0.0
    seed: int = 0
    schema: Mapping[str, Any] | None = None  # JSON schema of the answers
    category: str = ""


@dataclass(frozen=True)
class Workload:
    """A named, endless list of tasks; `task(index)` returns the same task each time."""

    name: str
    task: Callable[[int], Task]

    def tasks(self, count: int, seed: int = 0) -> list[Task]:
        """Returns the first `count` tasks, with the seeds `seed`, `seed` + 1, ..."""
        return [replace(self.task(index), seed=seed + index) for index in range(count)]

    def at(self, temperature: float) -> "Workload":
        """Returns the same workload at another temperature, which is appended to its name."""
        name = f"{self.name} T={temperature:g}"
        return Workload(name, lambda index: replace(self.task(index), temperature=temperature))

    def limited(self, max_tokens: int | None, *, exactly: bool = False) -> "Workload":
        """Returns the same workload with answers of at most `max_tokens`, or of exactly that many."""
        if max_tokens is None:
            return self
        return Workload(self.name, lambda index: replace(self.task(index), max_tokens=max_tokens, ignore_eos=exactly))


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A setting for which other engines have published numbers. Lengths in tokens, before `--scale`."""

    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: tuple[int, ...]


PRESETS = {
    "sharegpt-2500-1500": Preset(
        input_tokens=2500, output_tokens=1500, requests=80, concurrency=(1, 2, 4, 8, 16, 20, 32, 40, 64, 80)
    )
}


def names() -> tuple[str, ...]:
    return (*(name for name in _DATA if name not in ("sentences", "slots")), "mixed", "synthetic")


def find(name: str, count_tokens: Callable[[str], int], texts: Seq[str] = ()) -> list[Workload]:
    """Returns the workloads of one name: a built-in one, FILE.jsonl, FILE.jsonl:CATEGORY, or FILE.jsonl:each for one
    workload per category. `texts`: sources for synthetic prompts. Raises UsageError for an unknown name or bad file."""
    path, _, category = name.partition(".jsonl:") if ".jsonl:" in name else (name.removesuffix(".jsonl"), "", "")
    if path != name:
        return from_file(Path(f"{path}.jsonl"), category)
    if name == "mixed":
        return [Workload(name, lambda i: _task(MIXED[i % len(MIXED)], i // len(MIXED), count_tokens))]
    if name == "synthetic":
        return [synthetic(SYNTHETIC_INPUT, count_tokens, texts, name)]
    if name not in names():
        hint = f"choose {', '.join(names())}, or a FILE.jsonl"
        raise UsageError(f"--workload is {name!r}, which is unknown", hint)
    return [Workload(name, cache(partial(_task, name, count_tokens=count_tokens)))]


def synthetic(tokens: int, count_tokens: Callable[[str], int], texts: Seq[str] = (), name: str = "") -> Workload:
    """Returns a workload whose prompts have about `tokens` tokens, from `texts` or built-in sentences."""

    @cache  # counting tokens takes time
    def task(index: int) -> Task:
        return Task(turns=(cut(_endless(texts, index), tokens, count_tokens),))

    return Workload(name or f"synthetic {tokens}", task)


def cut(text: Callable[[int], str], tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Returns a text of about `tokens` tokens, to within a word. `text(n)` must return the first n words."""
    words = max(1, tokens * 2 // 3)
    for _ in range(6):
        length = count_tokens(text(words))
        if length == tokens:
            break
        step = round((tokens - length) * words / max(length, 1)) or (1 if length < tokens else -1)
        words = max(1, words + step)
    return text(words)


def _endless(texts: Seq[str], start: int) -> Callable[[int], str]:
    """Returns a function n -> the first n words of an endless text; each `start` gives another text."""
    rng = random.Random(start)
    words = list[str]()

    def first(count: int) -> str:
        while len(words) < count:
            number = start * 97 + len(words)
            sentence = texts[rng.randrange(len(texts))] if texts else _fill(rng.choice(_DATA["sentences"]), number)
            words.extend(sentence.split())
        return " ".join(words[:count])

    return first


def _task(name: str, index: int, count_tokens: Callable[[str], int]) -> Task:
    """Returns task `index` of a built-in workload: its templates in turn, filled with other words each time."""
    kind: Mapping[str, Any] = _DATA[name]
    turns: list[str] = kind["turns"][index % len(kind["turns"])]
    if context_tokens := kind.get("context_tokens"):
        context = cut(_endless((), index), context_tokens, count_tokens)
        turns = [turn.replace("{context}", context) for turn in turns]
    return Task(
        turns=tuple(_fill(turn, index // len(kind["turns"])) for turn in turns), system=kind.get("system", ""),
        temperature=kind.get("temperature", 0.0), schema=kind.get("schema"), category=name,
    )  # fmt: skip


def _fill(template: str, number: int) -> str:
    """Replaces {name} by entry `number` of the list "name", {name2} by the entry after it. Lists repeat."""
    slots: Mapping[str, list[str]] = {**_DATA["slots"], "number": [str(n) for n in range(3, 40)]}

    def entry(match: re.Match[str]) -> str:
        words = slots[match[1]]
        return words[(number + int(match[2] or 1) - 1) % len(words)]

    return _SLOT.sub(entry, template)


def from_file(path: Path, category: str = "") -> list[Workload]:
    """Returns workloads that repeat the tasks of a JSONL file. Raises UsageError as `read_tasks`, and for an unknown
    category."""
    tasks = read_tasks(path)
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(task.category, []).append(task)
    if not category:
        return [_cycle(path.stem, _interleaved(list(groups.values())))]
    if category != EACH and category not in groups:
        hint = f"it has {', '.join(filter(None, groups)) or 'none'}"
        raise UsageError(f"{path} has no category {category!r}", hint)
    chosen = groups if category == EACH else {category: groups[category]}
    return [_cycle(name or path.stem, tasks) for name, tasks in chosen.items()]


def _interleaved(groups: list[list[Task]]) -> list[Task]:
    """Returns the first task of each category, then the second of each, and so on."""
    longest = max(map(len, groups))
    return [tasks[i] for i in range(longest) for tasks in groups if i < len(tasks)]


def _cycle(name: str, tasks: list[Task]) -> Workload:
    return Workload(name, lambda index: tasks[index % len(tasks)])


def read_tasks(path: Path) -> list[Task]:
    """Returns the tasks of a JSONL file. A record is a prompt, or has "prompt", "turns" (only the first is used) or
    "messages"; "category", "system", "max_tokens" and "temperature" are optional. Raises UsageError for an unreadable
    or empty file, or bad lines."""
    lines = read_text(path).splitlines()
    tasks, bad = list[Task](), list[str]()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(_parse(line))
            except ValueError as error:
                bad.append(f"line {number} {error}")
    if bad:
        more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
        hint = 'a record is {"prompt": "text"}, {"turns": ["text", ...]} or {"messages": [{"role", "content"}, ...]}'
        count = f"{len(bad)} bad line{'s' if len(bad) > 1 else ''} of {len(lines)}"
        raise UsageError(f"{path} has {count}: {'; '.join(bad[:3])}{more}", hint)
    if not tasks:
        raise UsageError(f"{path} holds no task", "one JSON record per line")
    return tasks


def _parse(line: str) -> Task:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg})") from None
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    turns, system = _turns(record)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("has no prompt")
    tokens, temperature = record.get("max_tokens", DEFAULT_TOKENS), record.get("temperature", 0.0)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ValueError(f"has max_tokens {tokens!r}, not a whole number above 0")
    if not isinstance(temperature, int | float) or isinstance(temperature, bool) or not 0 <= temperature < 100:
        raise ValueError(f"has temperature {temperature!r}, not a number from 0 on")
    system, category = str(record.get("system", system)), str(record.get("category", ""))
    return Task(turns=tuple(turns), system=system, max_tokens=tokens, temperature=float(temperature), category=category)


def _turns(record: Mapping[str, Any]) -> tuple[list[Any], str]:
    """Returns (user messages, system message) of a record; assistant messages are ignored."""
    if "prompt" in record:
        return [record["prompt"]], ""
    if isinstance(turns := record.get("turns"), list):
        return turns[:1], ""
    if isinstance(messages := record.get("messages"), list):
        parts = [each for each in messages if isinstance(each, dict)]
        system = " ".join(str(each.get("content")) for each in parts if each.get("role") == "system")
        return [each.get("content") for each in parts if each.get("role") == "user"], system
    return [], ""
