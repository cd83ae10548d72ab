"""Training records: JSONL lines in, token sequences with the rows that carry loss out.

A line is one of {"messages": [{"role", "content"}, ...]}, {"prompt", "response"} and {"text"}; `kind` (else `category`)
names the kind of text in counts and held-out results, `source` and `licence` are for the model card. A line that the
model itself wrote may carry `prompt_ids` and `response_ids` beside its text, or alone: the exact tokens, taken as they
are. `held_out` (true or false) says whether it is held out; else that follows from the prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headstart.core import Int32
from headstart.errors import UsageError

MAX_TOKENS = 1024
MIN_TOKENS = 16
HELD_OUT_EVERY = 50
"""One record in this many is held out (2 %)."""

Message = Mapping[str, Any]


class ChatText(Protocol):
    """What data needs of a model's text side."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def encode(self, text: str) -> list[int]:
        """Text to ids; special tokens written in the text become themselves."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The model's chat template."""


@dataclass(frozen=True)
class Record:
    """One usable line. `text` of plain text, or else `messages`."""

    kind: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    side: bool | None = None  # as the line says

    @property
    def held_out(self) -> bool:
        """By the prompt: all that follows from one first question is on one side."""
        if self.side is not None:
            return self.side
        first = next((m["content"] for m in self.messages if m["role"] == "user"), self.messages or self.prompt_ids)
        content = self.text or str(first)
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big") % HELD_OUT_EVERY == 0


@dataclass(frozen=True, eq=False)
class Example:
    """One sequence. `loss[p]`: row p predicts a token that counts (a token of an answer; of plain text, any)."""

    kind: str
    tokens: Int32  # [T]
    loss: NDArray[np.bool_]  # [T]
    held_out: bool = False

    @property
    def key(self) -> str:
        """Identity in the feature cache."""
        return hashlib.sha256(self.tokens.tobytes() + self.loss.tobytes()).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class Problems:
    """Lines that could not be used: how many, and the first few by name."""

    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, where: str, why: str) -> None:
        self.count += 1
        if len(self.named) < 5:
            self.named.append(f"{where}: {why}")

    def lines(self) -> list[str]:
        rest = self.count - len(self.named)
        return [f"skipped {line}" for line in self.named] + ([f"skipped {rest} more lines"] if rest else [])


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Files as given and the .jsonl files of folders, sorted. Raises UsageError for a path that does not exist."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(path.rglob("*.jsonl"))
        elif path.is_file():
            files.append(path)
        else:
            raise UsageError(f"{path} does not exist", "data is a .jsonl file or a folder of them")
    return files


def read_records(paths: Iterable[Path], problems: Problems) -> list[Record]:
    """All usable records. Raises UsageError for a file that holds none."""
    records: list[Record] = []
    for path in find_files(paths):
        before = len(records)
        records += read_file(path, problems)
        if len(records) == before:
            raise UsageError(f"{path} holds no training records", _HINT)
    if not records:
        raise UsageError("there is no training data", "give --data files or folders, or --prompts")
    return records


_HINT = 'each line is {"messages": [...]}, {"prompt": ..., "response": ...} or {"text": ...}'


def read_file(path: Path, problems: Problems) -> Iterator[Record]:
    """Usable records of one file; the others go to `problems`."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield parse(json.loads(line), path.stem)
            except json.JSONDecodeError as error:
                problems.add(f"{path}:{number}", f"not JSON ({error.msg})")
            except ValueError as error:
                problems.add(f"{path}:{number}", str(error))


def parse(line: Any, default_kind: str) -> Record:
    """One decoded line. Raises ValueError saying what is wrong."""
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    kind = str(line.get("kind") or line.get("category") or default_kind)
    if isinstance(line.get("text"), str):
        if not line["text"].strip():
            raise ValueError("text is empty")
        return Record(kind, text=line["text"])
    ids: dict[str, Any] = {name: _ids(line[name]) for name in ("prompt_ids", "response_ids") if line.get(name)}
    if isinstance(line.get("held_out"), bool):
        ids["side"] = line["held_out"]
    if "messages" in line:
        return Record(kind, messages=_checked(line["messages"]), **ids)
    if isinstance(line.get("prompt"), str) and isinstance(line.get("response"), str):
        pair = [{"role": "user", "content": line["prompt"]}, {"role": "assistant", "content": line["response"]}]
        return Record(kind, messages=_checked(pair), **ids)
    if line.get("prompt_ids") and line.get("response_ids"):
        return Record(kind, **ids)
    raise ValueError("has neither text, messages nor prompt and response")


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(token, int) and token >= 0 for token in value):
        raise ValueError("prompt_ids or response_ids is not a list of token ids")
    return tuple(value)


def _checked(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages is not a list of objects")
    if not all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):
        raise ValueError("a message lacks role or content")
    if not any(m["role"] == "assistant" and m["content"].strip() for m in messages):
        raise ValueError("no answer of an assistant")
    return tuple(messages)


def encode_records(records: Iterable[Record], text: ChatText, problems: Problems) -> list[Example]:
    """Records to examples; long text becomes windows of equal length, long chats are cut at their end."""
    examples: list[Example] = []
    for number, record in enumerate(records):
        try:
            if record.text:
                examples += _windows(record, text)
            else:
                examples.append(_exact(record) if record.prompt_ids and record.response_ids else _chat(record, text))
        except ValueError as error:
            problems.add(f"record {number} ({record.kind})", str(error))
    if not any(not example.held_out for example in examples):
        raise UsageError("no record is left to train on", "; ".join(problems.named) or "add data")
    return examples


def _windows(record: Record, text: ChatText) -> list[Example]:
    ids = np.asarray(text.encode(record.text), np.int32)
    if len(ids) < MIN_TOKENS:
        raise ValueError(f"only {len(ids)} tokens")
    parts = np.array_split(ids, -(-len(ids) // MAX_TOKENS))
    return [Example(record.kind, part, np.ones(len(part), np.bool_), record.held_out) for part in parts]


def _chat(record: Record, text: ChatText) -> Example:
    """Prompt and answer are encoded apart, as they are at run time. Only answers carry loss, up to their end token."""
    ids: list[int] = []
    is_answer: list[bool] = []
    done = ""
    for i, message in enumerate(record.messages):
        if message["role"] != "assistant":
            continue
        prompt = text.render(record.messages[:i], True)
        whole = text.render(record.messages[: i + 1], False)
        if not (prompt.startswith(done) and whole.startswith(prompt)):
            raise ValueError("the chat template rewrites earlier turns")
        context, answer = text.encode(prompt[len(done) :]), text.encode(whole[len(prompt) :])
        end = next((n + 1 for n, token in enumerate(answer) if token in text.end_ids), len(answer))
        ids += context + answer
        is_answer += [False] * len(context) + [n < end for n in range(len(answer))]
        done = whole
    tokens, answers = np.asarray(ids[:MAX_TOKENS], np.int32), np.asarray(is_answer[:MAX_TOKENS], np.bool_)
    loss = np.append(answers[1:], False)
    if loss.sum() < 2:
        raise ValueError(f"no answer within {MAX_TOKENS} tokens")
    return Example(record.kind, tokens, loss, record.held_out)


def _exact(record: Record) -> Example:
    """The tokens as the model read and wrote them."""
    ids = (record.prompt_ids + record.response_ids)[:MAX_TOKENS]
    return example_of_answer(record.kind, ids, len(record.prompt_ids), record.held_out)


def example_of_answer(kind: str, ids: Sequence[int], num_prompt: int, held_out: bool) -> Example:
    """A prompt of `num_prompt` tokens and its answer. Raises ValueError if hardly anything of the answer is there."""
    places = np.arange(len(ids))
    loss = (places >= num_prompt - 1) & (places < len(ids) - 1)
    if loss.sum() < 2:
        raise ValueError(f"no answer within {MAX_TOKENS} tokens")
    return Example(kind, np.asarray(ids, np.int32), loss, held_out)


def count_tokens(examples: Iterable[Example]) -> dict[str, dict[str, int]]:
    """Kind -> records (sequences), tokens, and tokens that carry loss."""
    counts: dict[str, dict[str, int]] = {}
    for example in examples:
        row = counts.setdefault(example.kind, {"sequences": 0, "tokens": 0, "loss": 0})
        row["sequences"] += 1
        row["tokens"] += len(example)
        row["loss"] += int(example.loss.sum())
    return dict(sorted(counts.items()))


def draft_vocabulary(
    examples: Sequence[Example], size: int, end_ids: Iterable[int], known: Iterable[int] = ()
) -> NDArray[np.int64]:
    """The `size` most frequent predicted tokens, and the end tokens, as ascending ids; `known` ones fill up what the
    text leaves."""
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.tokens[1:][example.loss[:-1]].tolist())
    # ties to the lower id: the same data gives the same vocabulary
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    ends = sorted(set(end_ids))
    chosen = ends + [token for token in (*ranked, *known) if token not in set(ends)]
    return np.sort(np.asarray(list(dict.fromkeys(chosen))[: max(size, len(ends))], np.int64))


def coverage(examples: Iterable[Example], vocabulary: NDArray[np.int64]) -> dict[str, float]:
    """Kind -> share of its predicted tokens that the draft vocabulary holds."""
    hits: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for example in examples:
        predicted = example.tokens[1:][example.loss[:-1]]
        hits[example.kind] += int(np.isin(predicted, vocabulary).sum())
        totals[example.kind] += len(predicted)
    return {kind: hits[kind] / max(total, 1) for kind, total in sorted(totals.items())}
