"""What is typed after a slash in `headstart chat`: settings of the conversation, and files of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from headstart.cli.settings import close_to
from headstart.core import SamplingParams
from headstart.errors import UsageError
from headstart.files import write_whole

ROLES = ("system", "user", "assistant")
WHOLE = ("top_k", "max_tokens", "min_tokens", "seed")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
SYSTEM = "system"
NO_SEED = "none"
Message = dict[str, str]


@dataclass
class Talk:
    """A conversation: its turns without the system message, and how answers are made."""

    params: SamplingParams
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def asking(self, text: str) -> list[Message]:
        """All that the model is given for one more question."""
        return [*self.all, {"role": "user", "content": text}]

    @property
    def all(self) -> list[Message]:
        return [*([{"role": SYSTEM, "content": self.system}] if self.system else []), *self.turns]

    def answered(self, text: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str | None:
        """Do what a line with a slash says; a text that it wants answered. Raises UsageError."""
        name, _, rest = line.partition(" ")
        if name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, n=1)
            raise UsageError(f"unknown command {name}", f"did you mean {near[0]}?" if near else "/help lists them")
        return COMMANDS[name][0](self, rest.strip())


def _help(talk: Talk, rest: str) -> None:
    for name, (_, usage) in COMMANDS.items():
        _say(f"{name + ' ' + usage.partition(':')[0]:24} {usage.partition(':')[2].strip()}")
    _say('Lines between """ and """ are one text, as is what is pasted. Ctrl-C ends an answer, twice the conversation.')


def _reset(talk: Talk, rest: str) -> None:
    talk.turns.clear()


def _set(talk: Talk, rest: str) -> None:
    name, _, text = rest.partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if not name:
        for known in (*NUMBERS, *WHOLE):
            _say(f"{known} {NO_SEED if (value := getattr(talk.params, known)) is None else value}")
        _say(f"{SYSTEM} {talk.system or ''}")
    elif name == SYSTEM:
        talk.system = text or None
    elif name not in (*NUMBERS, *WHOLE):
        raise UsageError(f"{name} cannot be set", close_to(name, (*NUMBERS, *WHOLE, SYSTEM)))
    elif name == "seed" and text == NO_SEED:
        talk.params = replace(talk.params, seed=None)
    else:
        try:
            number: Any = int(text) if name in WHOLE else float(text)
        except ValueError:
            raise UsageError(f"{name} is {text!r}, which is no number", f"for example /set {name} 1") from None
        talk.params = replace(talk.params, **{name: number})


def _save(talk: Talk, rest: str) -> None:
    path = _path(rest, "/save")
    if path.exists():
        raise UsageError(f"{path} is there already", "choose another name")
    settings = {name: getattr(talk.params, name) for name in (*NUMBERS, *WHOLE)}
    try:
        write_whole(path, json.dumps({"messages": talk.all, "settings": settings}, ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "choose another place") from None
    _say(f"saved to {path}")


def _load(talk: Talk, rest: str) -> None:
    path = _path(rest, "/load")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        messages = [{"role": str(each["role"]), "content": str(each["content"])} for each in document["messages"]]
        settings = {name: value for name, value in document.get("settings", {}).items() if name in (*NUMBERS, *WHOLE)}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "is the path right?") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path} holds no conversation", "/save writes one") from None
    if any(each["role"] not in ROLES for each in messages):
        raise UsageError(f"{path} has a turn of somebody else than {', '.join(ROLES)}", "/save writes one")
    talk.params = replace(talk.params, **settings)
    talk.system = next((each["content"] for each in messages if each["role"] == SYSTEM), None)
    talk.turns = [each for each in messages if each["role"] != SYSTEM]
    _say(f"{len(talk.turns)} turns")


def _regenerate(talk: Talk, rest: str) -> str:
    if [each["role"] for each in talk.turns[-2:]] != ["user", "assistant"]:
        raise UsageError("there is no answer yet", "ask something first")
    if talk.params.temperature == 0:
        raise UsageError("at temperature 0 the answer would be the same", "/set temperature 0.7")
    if talk.params.seed is not None:
        raise UsageError("with this seed the answer would be the same", f"/set seed {NO_SEED}")
    question, _ = talk.turns.pop(-2), talk.turns.pop()
    return question["content"]


def _path(text: str, command: str) -> Path:
    if not text:
        raise UsageError(f"{command} needs the name of a file", f"for example {command} talk.json")
    return Path(text).expanduser()


def _say(text: str) -> None:
    print(text, file=sys.stderr)


COMMANDS: Mapping[str, tuple[Callable[[Talk, str], str | None], str]] = {
    "/help": (_help, ": this list"),
    "/set": (_set, "NAME VALUE: temperature, top_p, max_tokens, seed, system, ...; alone: what is set"),
    "/regenerate": (_regenerate, ": another answer to the last question"),
    "/save": (_save, "FILE: the conversation and its settings, as JSON"),
    "/load": (_load, "FILE: go on with one that was saved"),
    "/reset": (_reset, ": forget the conversation"),
    "/exit": (_reset, ": end it"),
}
"""What each does, and how it is written; `/exit` is seen to by who reads the lines."""
