"""`headstart chat`: a conversation in the terminal, with commands such as /set and /save."""

import base64
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headstart.cli.generate import WordWrap, print_stream
from headstart.cli.options import EngineOptions, SamplingOptions, read_template, with_adapted
from headstart.cli.parser import command
from headstart.cli.render import print_error, print_note, progress, text_stdin
from headstart.errors import CapacityError, UsageError, did_you_mean
from headstart.files import read_text, user_path, write_atomic
from headstart.hub import DEFAULT_MODEL, DEMO_NOTE
from headstart.options import ModelOptions, option
from headstart.params import SamplingParams, parameters
from headstart.server.options import CHAT_TEMPLATE_HELP
from headstart.system import Terminated, has_input, line_editing

if TYPE_CHECKING:
    from headstart.api import LLM

ENDS = ("/exit", "/quit", "/bye")
HELP = "/help lists commands, /exit ends the conversation; Ctrl-C ends an answer"
QUOTES = '"""'  # enclose a text of several lines
MAX_HISTORY = 1000  # lines of the history that the arrow keys show
COLUMNS = 80  # width of a terminal that does not report one
PASTE_S = 0.05  # lines within this time of each other were pasted together
ROLES = ("system", "user", "assistant")
WHOLE_NUMBERS = ("top_k", "max_tokens", "min_tokens", "seed")
PARAMETERS = (*(row.name for row in parameters().values() if row.kind == "number"), *WHOLE_NUMBERS)
"""Sampling parameters that /set changes."""
IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
SYSTEM = "system"
NO_SEED = "none"


@dataclass(frozen=True, kw_only=True)
class ChatFlags(ModelOptions):
    """The model and its system message."""

    system: str | None = option("A system message.", may_be_empty=True)
    chat_template: str | None = option(CHAT_TEMPLATE_HELP, metavar="NAME|FILE")


@dataclass(frozen=True, kw_only=True)
class ChatSamplingOptions(SamplingOptions):
    """SamplingOptions of a conversation."""

    refused: ClassVar[frozenset[str]] = frozenset({"n", "logprobs"})


@command(
    "headstart chat",
    "headstart chat --system 'Answer in one sentence.' --temperature 0.7",
    "printf 'Hello!\\nAnd again?\\n' | headstart chat",
)
def run(flags: ChatFlags, sampling: ChatSamplingOptions, engine: EngineOptions) -> int:
    """Chat with a model; reads lines from a terminal or a pipe."""
    given = sampling.params(engine.config.seed)
    if given.n > 1:
        raise UsageError("chat gives one answer per turn", "leave out --n")
    if given.logprobs is not None:
        raise UsageError("chat prints no logprobs", "leave out --logprobs; headstart generate --json has them")

    template = read_template(flags.chat_template)

    from headstart.api import LLM

    with progress("loading") as report_progress:
        llm = LLM(flags.model, with_adapted(flags.model, engine.config), report_progress)
    if template is not None:
        llm.use_chat_template(template)
    if llm.model.name == DEFAULT_MODEL:
        print_note(DEMO_NOTE)
    if not llm.has_chat_template:
        print_note(f"{llm.model.name} has no chat template: it continues your text; --chat-template chatml makes turns")
    params = sampling.params(engine.config.seed, llm.chat_sampling)
    stop = (*llm.turn_end, *params.stop)
    session = ChatSession(replace(params, stop=stop), flags.system, reads_images=llm.image_processor is not None)
    with suppress(SecondInterrupt):
        for text in _read_turns():
            if text in ENDS:
                break
            try:
                prompt = session.take(text)
            except UsageError as error:
                print_error(error.message, error.hint)
                continue
            if prompt:
                _answer(llm, session, prompt)
    return 0


def _answer(llm: "LLM", session: "ChatSession", content: Any) -> None:
    """Print the answer to a text or to content parts, and record the turn, unless it does not fit the context."""
    from headstart.text.conversation import plain_text

    messages = [*session.messages, {"role": "user", "content": content}]
    try:
        with _catch_ctrl_c() as is_pressed:
            wrap = WordWrap(_columns) if sys.stdout.isatty() else None
            is_raw = not llm.has_chat_template
            prompt = plain_text(messages) if is_raw else messages
            answer = print_stream(llm.stream(prompt, session.params, raw=is_raw), is_pressed, wrap)
    except CapacityError as error:
        print_error(error.message, "/reset starts a new conversation")
    except UsageError as error:  # the chat template refuses the messages
        print_error(error.message, error.hint)
    else:
        session.turns += [messages[-1], {"role": "assistant", "content": answer}]


def _columns() -> int:
    return os.get_terminal_size(sys.stdout.fileno()).columns or COLUMNS


class SecondInterrupt(KeyboardInterrupt):
    """Ctrl-C was pressed twice during an answer. No handler of `Exception` or EOFError catches it."""


@contextmanager
def _catch_ctrl_c() -> Iterator[Callable[[], bool]]:
    """A function that returns whether Ctrl-C was pressed. At a terminal the first Ctrl-C ends the answer after the
    running step of the engine, the second one raises SecondInterrupt."""
    pressed: list[int] = []

    def record(number: int, frame: object) -> None:
        if pressed:
            raise SecondInterrupt
        pressed.append(number)

    if not sys.stdin.isatty():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, record)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _read_turns() -> Iterator[str]:
    """The texts of the user: lines of a pipe, edited lines or pasted texts of a terminal, texts between QUOTES."""
    if not sys.stdin.isatty():
        with text_stdin() as stdin:
            for line in stdin:
                yield "\n".join(_read_quoted(line.strip(), lambda: next(stdin, QUOTES).rstrip("\n")))
        return
    with line_editing(history_file(), MAX_HISTORY):
        yield from _read_terminal()


def history_file() -> Path:
    """Typed lines of earlier conversations."""
    from headstart.hub import cache_dir

    return cache_dir() / "chat_history"


def _read_quoted(first: str, more: Callable[[], str]) -> list[str]:
    """Returns the lines of a text between QUOTES, calling `more` for further lines; else only the first line."""
    if not first.startswith(QUOTES):
        return [first]
    lines = [first.removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(more())
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return lines


def _read_terminal() -> Iterator[str]:
    print_note(HELP)
    is_leaving = False
    while True:
        try:
            lines = _read_quoted(input("> "), lambda: input("... "))
            while not lines[-1].startswith("/") and has_input(PASTE_S):
                lines.append(input())
        except EOFError:
            print()
            return
        except Terminated:
            raise
        except KeyboardInterrupt:
            if is_leaving:
                print()
                return
            is_leaving = True
            print_note("\nCtrl-C again, or /exit, ends the conversation")
            continue
        is_leaving = False
        command = [lines.pop()] if lines[-1].startswith("/") else []
        yield from (text.strip() for text in ("\n".join(lines), *command) if text)


@dataclass
class ChatSession:
    """A conversation and its settings."""

    params: SamplingParams
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)  # messages without the system message
    reads_images: bool = False
    images: list[dict[str, Any]] = field(default_factory=list)  # content parts for the next text

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [*([{"role": SYSTEM, "content": self.system}] if self.system else []), *self.turns]

    def take(self, text: str) -> Any:
        """Run a command, or keep the image whose path was pasted; returns the content to answer, or None."""
        if self.reads_images and (path := pasted_image(text)) is not None:
            _image(self, path)
            return None
        content: Any = self.run_command(text) if text.startswith("/") else text
        if self.images and isinstance(content, str):
            content, self.images = [*self.images, {"type": "text", "text": content}], []
        return content

    def run_command(self, line: str) -> Any:
        """Run a line that begins with a slash; returns a text to answer. Raises UsageError."""
        name, _, rest = line.partition(" ")
        if name not in COMMANDS:
            raise UsageError(f"unknown command {name}", did_you_mean(name, COMMANDS) or "/help lists them")
        return COMMANDS[name][0](self, rest.strip())


def pasted_image(text: str) -> str | None:
    """The path of an image file that is all of a text, as terminals paste dropped files; None for other texts."""
    if "\n" in text or not text.rstrip("'\" ").lower().endswith(IMAGE_ENDINGS):
        return None
    for words in ([text], _words(text)):
        with suppress(OSError):
            if len(words) == 1 and user_path(words[0]).is_file():
                return words[0]
    return None


def _words(text: str) -> list[str]:
    with suppress(ValueError):
        return shlex.split(text)
    return []


def _image(session: ChatSession, rest: str) -> None:
    path = _path(rest, "/image", "cat.jpg")
    if not session.reads_images:
        raise UsageError("this model reads text only", "take a model with a vision tower")
    from headstart.text.images import read_image_file

    data, image = read_image_file(path)
    session.images.append(
        {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(data).decode()}"}}
    )
    _say(f"{path}: {image.size[0]} x {image.size[1]} pixels, for your next message")


def _help(session: ChatSession, rest: str) -> None:
    for name, (_, usage) in COMMANDS.items():
        _say(f"{name + ' ' + usage.partition(':')[0]:24} {usage.partition(':')[2].strip()}")
    _say('Lines between """ and """ are one text, as is what is pasted. Ctrl-C ends an answer, twice the conversation.')


def _reset(session: ChatSession, rest: str) -> None:
    session.turns.clear()
    session.images.clear()


def _set(session: ChatSession, rest: str) -> None:
    name, _, text = rest.partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if not name:
        for known in PARAMETERS:
            _say(f"{known} {NO_SEED if (value := getattr(session.params, known)) is None else value}")
        _say(f"{SYSTEM} {session.system or ''}")
    elif name == SYSTEM:
        session.system = text or None
    elif name not in PARAMETERS:
        hint = did_you_mean(name, (*PARAMETERS, SYSTEM)) or "/set lists the settings"
        raise UsageError(f"{name} cannot be set", hint)
    elif name == "seed" and text == NO_SEED:
        session.params = replace(session.params, seed=None)
    else:
        try:
            number: Any = int(text) if name in WHOLE_NUMBERS else float(text)
        except ValueError:
            raise UsageError(f"{name} is {text!r}, which is no number", f"for example /set {name} 1") from None
        session.params = replace(session.params, **{name: number})


def _save(session: ChatSession, rest: str) -> None:
    path = _path(rest, "/save")
    if path.exists():
        raise UsageError(f"{path} is there already", "choose another name")
    document = {"messages": session.messages, "settings": {name: getattr(session.params, name) for name in PARAMETERS}}
    try:
        write_atomic(path, json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "choose another place") from None
    _say(f"saved to {path}")


def _load(session: ChatSession, rest: str) -> None:
    path = _path(rest, "/load")
    try:
        document = json.loads(read_text(path))
        messages = [{"role": str(each["role"]), "content": _content(each["content"])} for each in document["messages"]]
        settings = {name: value for name, value in document.get("settings", {}).items() if name in PARAMETERS}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path} holds no conversation", "/save writes one") from None
    if any(each["role"] not in ROLES for each in messages):
        raise UsageError(f"{path} has a role other than {', '.join(ROLES)}", "/save writes one")
    session.params = replace(session.params, **settings)
    session.system = next((each["content"] for each in messages if each["role"] == SYSTEM), None)
    session.turns = [each for each in messages if each["role"] != SYSTEM]
    _say(f"{len(session.turns)} turns")


def _content(given: Any) -> Any:
    """The content of a saved message: text, or parts with images. Raises TypeError for other parts."""
    if not isinstance(given, list):
        return str(given)
    if not all(isinstance(part, dict) and part.get("type") in ("text", "image_url") for part in given):
        raise TypeError
    return given


def _regenerate(session: ChatSession, rest: str) -> Any:
    if [each["role"] for each in session.turns[-2:]] != ["user", "assistant"]:
        raise UsageError("there is no answer yet", "ask something first")
    if session.params.temperature == 0:
        raise UsageError("at temperature 0 the answer would be the same", "/set temperature 0.7")
    if session.params.seed is not None:
        raise UsageError("with this seed the answer would be the same", f"/set seed {NO_SEED}")
    question, _ = session.turns.pop(-2), session.turns.pop()
    return question["content"]


def _path(text: str, command: str, example: str = "talk.json") -> Path:
    if not text:
        raise UsageError(f"{command} needs the name of a file", f"for example {command} {example}")
    return user_path(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


COMMANDS: Mapping[str, tuple[Callable[[ChatSession, str], Any], str]] = {
    "/help": (_help, ": this list"),
    "/set": (_set, "NAME VALUE: temperature, top_p, max_tokens, seed, system, ...; alone: what is set"),
    "/image": (_image, "FILE: an image for the next message; or paste its path"),
    "/regenerate": (_regenerate, ": another answer to the last question"),
    "/save": (_save, "FILE: the conversation and its settings, as JSON"),
    "/load": (_load, "FILE: go on with a saved conversation"),
    "/reset": (_reset, ": forget the conversation"),
    **dict.fromkeys(ENDS, (_reset, ": end it")),
}
"""Name -> function and usage; `run` itself handles ENDS."""
