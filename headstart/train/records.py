"""Training records: JSONL lines in, token sequences with the rows that carry loss out.

A line is one of {"messages": [{"role", "content"}, ...]}, with OpenAI's `tools` and `tool_calls`, {"prompt",
"response"} and {"text"}; ShareGPT's {"conversations": [{"from", "value"}, ...]}, Alpaca's {"instruction", "input",
"output"} and {"prompt", "completion"} are read, too. `kind` (else `category`) names
the kind of text in counts and held-out results; `source` and `licence` are for the model card. A line written by the
model may carry its exact tokens as `prompt_ids` and `response_ids`, beside its text or alone. `held_out` (true or
false) says whether the line is held out; without it a hash of the prompt decides.
"""

import hashlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from headstart.core import Int32
from headstart.errors import CapacityError, ModelError, UsageError
from headstart.text.chat import ChatTemplate
from headstart.text.tokenizer import Tokenizer

MAX_TOKENS = 1024

MIN_TOKENS = 16

HELD_OUT_EVERY = 50  # one record in this many is held out (2 %)

Message = Mapping[str, Any]
T = TypeVar("T")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class ChatTokenizer:
    """A model's tokenizer and chat template, by which training records become token sequences."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    vocab_size: int  # of the model, which may have more ids than the tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.tokenizer.eos_ids

    def encode(self, text: str) -> list[int]:
        """Text to ids; special tokens written in the text become themselves."""
        return self.tokenizer.encode(text, add_special=False)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Message] = ()) -> str:
        """The chat template's text. Raises ValueError for a model without one."""
        if self.template is None:
            raise ValueError("the model has no chat template; only records with text can be used")
        return self.template.render(messages, add_generation_prompt, tools or None)


@dataclass(frozen=True)
class TrainingRecord:
    """One usable line."""

    kind: str
    text: str = ""  # plain text; empty for messages
    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()  # functions that the messages may call
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    held_out_flag: bool | None = None  # the line's own `held_out`

    @property
    def held_out(self) -> bool:
        """A hash of the first question decides, so that conversations with the same beginning stay together."""
        if self.held_out_flag is not None:
            return self.held_out_flag
        first = next((m["content"] for m in self.messages if m["role"] == "user"), self.messages or self.prompt_ids)
        content = self.text or str(first)
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:4], "big") % HELD_OUT_EVERY == 0


@dataclass(frozen=True, eq=False)
class Example:
    """One token sequence."""

    kind: str
    tokens: Int32  # [T]
    loss: NDArray[np.bool_]  # [T], row p predicts a token of an answer (of plain text: any token)
    held_out: bool = False

    @property
    def key(self) -> str:
        """Identity in the feature cache."""
        return hashlib.sha256(self.tokens.tobytes() + self.loss.tobytes()).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class SkippedRecords:
    """Lines that could not be used."""

    count: int = 0
    first: list[str] = field(default_factory=list)  # place and reason of the first few

    def add(self, where: str, why: str) -> None:
        self.count += 1
        if len(self.first) < 5:
            self.first.append(f"{where}: {why}")

    def example(self, path: Path) -> str:
        """The first reason in a file without usable lines, for its error."""
        return f" (line {self.first[0].removeprefix(f'{path}:')})" if self.first else ""

    def lines(self) -> list[str]:
        rest = self.count - len(self.first)
        return [f"skipped {line}" for line in self.first] + ([f"skipped {rest} more lines"] if rest else [])


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Files as given and the .jsonl files of folders, sorted. Raises UsageError for a path that does not exist and a
    folder without such files."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            if not (found := sorted(path.rglob("*.jsonl"))):
                raise UsageError(f"{path} holds no .jsonl file", "data is a .jsonl file or a folder of them")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise UsageError(f"{path} does not exist", "data is a .jsonl file or a folder of them")
    return files


def check_files(paths: Iterable[Path]) -> list[Path]:
    """The files of the paths. Raises UsageError for none, and for a file without a usable record."""
    files = find_files(paths)
    for path in files:
        if next(read_file(path, skipped := SkippedRecords()), None) is None:
            raise UsageError(f"{path} holds no training records{skipped.example(path)}", layout_hint(path, _HINT))
    if not files:
        raise UsageError("there is no training data", "give --data files or folders, or --prompts")
    return files


def read_records(paths: Iterable[Path], skipped: SkippedRecords) -> list[TrainingRecord]:
    """All usable records. Raises UsageError for a file without any."""
    return [record for path in check_files(paths) for record in read_file(path, skipped)]


_HINT = 'each line is {"messages": [...]}, {"prompt": ..., "response": ...} or {"text": ...}'


def layout_hint(path: Path, lines: str) -> str:
    """What to do about a file without usable lines; `lines`: what its lines should be."""
    with path.open("rb") as file:
        is_array = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    name = shlex.quote(str(path))
    return f"a JSON array is one line for each record after: jq -c '.[]' {name} > records.jsonl" if is_array else lines


def read_json_lines(path: Path, parse: Callable[[Any, str], T], skipped: SkippedRecords) -> Iterator[T]:
    """parse(line, the file's name) of each JSON line. Lines for which it raises ValueError go to `skipped`."""
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
                if "\\ud" in line.lower():  # the escape of half a pair is valid JSON, but no text
                    json.dumps(found, ensure_ascii=False).encode()
                yield parse(found, path.stem)
            except json.JSONDecodeError as error:
                skipped.add(f"{path}:{number}", f"not JSON ({error.msg})")
            except RecursionError:
                skipped.add(f"{path}:{number}", "nested too deeply")
            except UnicodeEncodeError:
                skipped.add(f"{path}:{number}", "half of a surrogate pair is no character")
            except ValueError as error:
                skipped.add(f"{path}:{number}", str(error))


def read_file(path: Path, skipped: SkippedRecords) -> Iterator[TrainingRecord]:
    """Usable records of one file; the other lines go to `skipped`."""
    return read_json_lines(path, parse_record, skipped)


def messages_of(line: Mapping[str, Any]) -> Any:
    """The messages of a line, with ShareGPT's names and OpenAI's parts of type text replaced; None without any."""
    messages = line.get("messages", line.get("conversations"))
    return [_as_message(each) for each in messages] if isinstance(messages, list) else messages


def _as_message(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    if isinstance(calls := given.get("tool_calls"), list) and calls:
        return {**given, "content": given.get("content") or "", "tool_calls": [_as_call(each) for each in calls]}
    if "from" in given and "value" in given:
        given = {"role": _SHAREGPT_ROLES.get(str(given["from"]), given["from"]), "content": given["value"]}
    parts = given.get("content")
    if isinstance(parts, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return {**given, "content": "".join(part["text"] for part in parts)}
    return given


def _as_call(given: Any) -> Any:
    """A call in the form that templates read: its arguments are an object."""
    function = given.get("function") if isinstance(given, dict) else None
    if not (isinstance(function, dict) and isinstance(text := function.get("arguments"), str)):
        return given
    try:
        return {**given, "function": {**function, "arguments": json.loads(text)}}
    except json.JSONDecodeError:
        raise ValueError("the arguments of a tool call are not JSON") from None


def question_of(line: Mapping[str, Any]) -> Any:
    """`prompt` of a line, else Alpaca's `instruction` and `input`; None without them."""
    if "prompt" in line or not isinstance(line.get("instruction"), str):
        return line.get("prompt")
    return "\n\n".join(filter(None, [line["instruction"], str(line.get("input") or "").strip()]))


def parse_record(line: Any, default_kind: str) -> TrainingRecord:
    """The record of one decoded line. Raises ValueError with the reason if it is unusable."""
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    kind = str(line.get("kind") or line.get("category") or default_kind)
    if isinstance(line.get("text"), str):
        if not line["text"].strip():
            raise ValueError("text is empty")
        return TrainingRecord(kind, text=line["text"])
    ids: dict[str, Any] = {name: _ids(line[name]) for name in ("prompt_ids", "response_ids") if line.get(name)}
    if isinstance(line.get("held_out"), bool):
        ids["held_out_flag"] = line["held_out"]
    if "messages" in line or "conversations" in line:
        tools = line.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
            raise ValueError("tools is not a list of objects")
        return TrainingRecord(kind, messages=_checked_messages(messages_of(line)), tools=tuple(tools), **ids)
    prompt = question_of(line)
    response = next((line[name] for name in ("response", "completion", "output") if name in line), None)
    if isinstance(prompt, str) and isinstance(response, str):
        pair = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return TrainingRecord(kind, messages=_checked_messages(pair), **ids)
    if line.get("prompt_ids") and line.get("response_ids"):
        return TrainingRecord(kind, **ids)
    raise ValueError("has neither text, messages nor prompt and response")


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(token, int) and token >= 0 for token in value):
        raise ValueError("prompt_ids or response_ids is not a list of token ids")
    return tuple(value)


def _checked_messages(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages is not a list of objects")
    if not all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages):
        raise ValueError("a message lacks role or content")
    if not any(m["role"] == "assistant" and (m["content"].strip() or m.get("tool_calls")) for m in messages):
        raise ValueError("no answer of an assistant")
    return tuple(messages)


def encode_records(records: Iterable[TrainingRecord], text: ChatTokenizer, skipped: SkippedRecords) -> list[Example]:
    """Records to examples. Long text becomes windows of equal length; long chats lose their end."""
    examples: list[Example] = []
    for number, record in enumerate(records):
        try:
            if record.text:
                examples += _encode_windows(record, text)
            elif record.prompt_ids and record.response_ids:
                _check_ids(record, text)
                examples.append(_encode_exact(record))
            else:
                examples.append(_encode_chat(record, text))
        except (ValueError, UsageError, ModelError) as error:  # the latter two are of the chat template
            skipped.add(f"record {number} ({record.kind})", getattr(error, "message", str(error)))
    if not any(not example.held_out for example in examples):
        raise UsageError("no record is left to train on", next(iter(skipped.first), "add data"))
    return examples


def _encode_windows(record: TrainingRecord, text: ChatTokenizer) -> list[Example]:
    ids = np.asarray(text.encode(record.text), np.int32)
    if len(ids) < MIN_TOKENS:
        raise ValueError(f"only {len(ids)} tokens")
    parts = np.array_split(ids, -(-len(ids) // MAX_TOKENS))
    return [Example(record.kind, part, np.ones(len(part), np.bool_), record.held_out) for part in parts]


def _encode_chat(record: TrainingRecord, text: ChatTokenizer) -> Example:
    """Prompt and answer are encoded separately, as at run time. Only answers carry loss, up to their end token."""
    ids: list[int] = []
    is_answer: list[bool] = []
    done = ""
    for i, message in enumerate(record.messages):
        if message["role"] != "assistant":
            continue
        prompt = text.render(record.messages[:i], True, record.tools)
        whole = text.render(record.messages[: i + 1], False, record.tools)
        if not (prompt.startswith(done) and whole.startswith(prompt)):
            raise ValueError("the chat template rewrites earlier turns")
        if not all(name in whole[len(prompt) :] for name in _called(message)):
            raise ValueError("the chat template does not write tool calls")
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


def _called(message: Message) -> list[str]:
    """Names of the functions that a message calls."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return [str(each["name"]) for each in functions if isinstance(each, dict) and "name" in each]


def _check_ids(record: TrainingRecord, text: ChatTokenizer) -> None:
    """Raises ValueError for token ids that another model has written."""
    if (last := max(record.prompt_ids + record.response_ids)) >= text.vocab_size:
        raise ValueError(f"token {last} is not in the vocabulary")
    if not record.messages:
        return
    decoded = text.tokenizer.decode([token for token in record.response_ids if token not in text.end_ids])
    # An answer that ends within a character, because the time was over, has U+FFFD or nothing there.
    answer, own = (each.removesuffix("\ufffd") for each in (record.messages[-1]["content"], decoded))
    if answer != own:
        raise ValueError("its token ids are not those of its text: another model's?")


def _encode_exact(record: TrainingRecord) -> Example:
    """The exact tokens that the model read and wrote."""
    ids = (record.prompt_ids + record.response_ids)[:MAX_TOKENS]
    return example_of_answer(record.kind, ids, len(record.prompt_ids), record.held_out)


def example_of_answer(kind: str, ids: Sequence[int], num_prompt: int, held_out: bool) -> Example:
    """A prompt of `num_prompt` tokens and its answer. Raises ValueError if less than two tokens carry loss."""
    rows = np.arange(len(ids))
    loss = (rows >= num_prompt - 1) & (rows < len(ids) - 1)
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
    """The end tokens, the `known` tokens and the most frequent predicted tokens, `size` in all, as ascending ids."""
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.tokens[1:][example.loss[:-1]].tolist())
    # ties to the lower id: the same data gives the same vocabulary
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    ends = sorted(set(end_ids))
    chosen = list(dict.fromkeys((*ends, *known, *ranked)))
    return np.sort(np.asarray(chosen[: max(size, len(ends))], np.int64))


def vocabulary_coverage(examples: Iterable[Example], vocabulary: NDArray[np.int64]) -> dict[str, float]:
    """Kind -> share of its predicted tokens that are in the draft vocabulary."""
    hits: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for example in examples:
        predicted = example.tokens[1:][example.loss[:-1]]
        hits[example.kind] += int(np.isin(predicted, vocabulary).sum())
        totals[example.kind] += len(predicted)
    return {kind: hits[kind] / max(total, 1) for kind, total in sorted(totals.items())}


RECORDS_PER_SHARD = 2000


class Shards:
    """Records in JSONL files `folder`/`prefix`-00000.jsonl and so on, appended line by line, so that an interrupted run
    loses no written record. Every record has a `key`; a key is stored once.

    Raises CapacityError when a file cannot be written; the next run uses the records before the failed line. Raises
    UsageError for other lines than records.
    """

    def __init__(self, folder: Path, prefix: str, per_shard: int = RECORDS_PER_SHARD) -> None:
        self.folder, self.prefix = folder, prefix
        self._per_shard = per_shard
        self._file: TextIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CapacityError(f"cannot write to {folder}: {error.strerror}", "give another folder") from None
        self._paths = sorted(folder.glob(f"{prefix}-*.jsonl"))
        for path in self._paths:
            drop_partial_line(path)
        self.keys = {record["key"] for record in self}
        self._lines_left = per_shard - (len(_lines(self._paths[-1])) if self._paths else per_shard)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for path in self._paths:
            for number, line in enumerate(_lines(path), 1):
                try:
                    record = json.loads(line)
                    record["key"]
                except (ValueError, KeyError, TypeError):
                    raise UsageError(f"{path}:{number} is no record", "remove this line") from None
                yield record

    def __len__(self) -> int:
        return len(self.keys)

    def append(self, record: dict[str, Any]) -> bool:
        """Write a record unless its key is stored already; returns whether it was written."""
        if record["key"] in self.keys:
            return False
        try:
            file = self._open()
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
        except OSError as error:
            self._abandon()
            hint = "free some space and run the same command again: it goes on from what is written"
            raise CapacityError(f"cannot write to {self.folder}: {error.strerror}", hint) from None
        self.keys.add(record["key"])
        self._lines_left -= 1
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _abandon(self) -> None:
        """Close a file that cannot take its buffered data."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file:
                file.close()

    def _open(self) -> TextIO:
        if self._lines_left <= 0:
            self.close()
            self._paths.append(self.folder / f"{self.prefix}-{len(self._paths):05}.jsonl")
            self._lines_left = self._per_shard
        if self._file is None:
            self._file = self._paths[-1].open("a", encoding="utf-8")
        return self._file


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def drop_partial_line(path: Path) -> None:
    """Remove a last line that a crash has cut off."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)  # writing the lines again would lose them on a full disk
