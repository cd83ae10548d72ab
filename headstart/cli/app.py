"""The `headstart` application: finds and runs a command; turns errors into one line on stderr and an exit code."""

import errno
import os
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from headstart.cli import completion, foreign_flags, settings
from headstart.cli.help import help_text
from headstart.cli.parser import HELP, HELP_ALL, Command, CommandGroup, all_commands
from headstart.cli.render import flush_all, lost_stdout, prepare_streams, print_error, print_json, stdout_error
from headstart.cli.settings import Settings
from headstart.errors import INTERNAL, HeadstartError, UsageError, status_of
from headstart.files import home_directory
from headstart.options import Option, ParseError
from headstart.system import TERMINATION_SIGNALS, Terminated
from headstart.version import __version__

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Use": {
        "demo": "bench.demo", "generate": "generate.run", "chat": "chat.run", "serve": "serve.run",
        "pull": "models.pull", "models": "models.GROUP", "ps": "models.ps", "stop": "models.stop",
        "doctor": "models.doctor", "completion": "completion.run",
    },
    "Measure": {"bench": "bench.GROUP", "tune": "bench.tune", "verify": "verify.verify", "plan": "plan.run"},
    "Heads": {
        "inspect": "checkpoints.inspect", "train": "train.train", "data": "train.data", "adapt": "train.adapt",
        "graft": "checkpoints.graft", "export": "checkpoints.export",
    },
    "Other engines": {"launch": "launch.run", "probe": "verify.probe", "gate": "gate.gate"},
}  # fmt: skip
"""Sections of `--help` -> commands in their order -> module and name in this package."""
COMMANDS: Mapping[str, str] = {name: place for section in SECTIONS.values() for name, place in section.items()}
VERSION = Option(name="version", help="Print the version.", kind=bool, flags=("--version",), default=False)
TRACEBACK_VARIABLE = "HEADSTART_TRACEBACK"
USAGE_EXIT_CODE = status_of(UsageError("")).exit_code
CHECK_PATH = "is the path right? HEADSTART_CACHE and HF_HOME say where caches are"
WRITE_HINTS = {
    errno.ENOSPC: "free some space there, or write to another place",
    errno.EDQUOT: "free some space there, or write to another place",
    errno.EFBIG: "a limit on the size of files is set: see ulimit -f",
}
SYSTEM_HINTS = {
    **WRITE_HINTS,
    errno.EMFILE: "a limit on open files is set: see ulimit -n",
    errno.ENOMEM: "free some memory",
    **dict.fromkeys(
        (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
         errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV, errno.ENOTEMPTY),
        CHECK_PATH,
    ),
}  # fmt: skip
"""errno of an operating system error that is not a bug -> hint for the user."""


def application(names: Iterable[str] = COMMANDS) -> CommandGroup:
    """Returns the root group with the commands `names`. Importing all of them takes a third of a second."""
    commands: dict[str, Command | CommandGroup] = {}
    for name in names:
        module, _, attribute = COMMANDS[name].partition(".")
        commands[name] = getattr(import_module(f"headstart.cli.{module}"), attribute)
    return CommandGroup(
        commands,
        help="An LLM engine built around multi-token prediction: the model's own heads draft, the text stays the same."
        "\n\nOptions may also stand in headstart.toml, or in the environment as HEADSTART_...: headstart doctor shows "
        "them.",
        examples=("headstart demo", "headstart generate --prompt 'Why is the sky blue?'"),
        options=(VERSION,),
        sections=SECTIONS,
    )


def run(arguments: list[str]) -> int:
    """Run the command that `arguments` name and flush all output; returns the exit code."""
    prepare_streams()
    os.environ.setdefault("HOME", str(home_directory()))  # huggingface_hub fails without a home directory
    places: dict[str, str] = {}  # where options are set, by flag
    try:
        with _interruptible():
            code = _dispatch(arguments, places)
    except HeadstartError as error:
        from headstart.cli.options import by_flag  # it imports the engine's options

        shown = by_flag(error)
        _report(*settings.add_places(shown.message, shown.hint, places), [*arguments, *places])
        code = status_of(error).exit_code
    except KeyboardInterrupt as error:
        print_error("interrupted", str(error))  # a command that can be resumed says how
        code = status_of(error).exit_code
    except Exception as error:  # noqa: BLE001  # the process edge
        lost = stdout_error() if isinstance(error, OSError) else None  # not a socket of the command
        if lost is not None:
            code = lost_stdout(lost)
        else:
            message, hint, code = _system_error(error) or _internal_error(error)
            _report(message, hint, [*arguments, *places])
    return flush_all(code)


def _report(message: str, hint: str, words: list[str]) -> None:
    """Print an error on stderr, and with --json the error's document on stdout. words: the command line, and the flags
    that settings have switched on."""
    print_error(message, hint)
    if "--json" in words:
        with suppress(OSError):  # stdout is closed: the exit code reports the error
            print_json({"error": {"message": message, "hint": hint}})


def _dispatch(words: list[str], places: dict[str, str]) -> int:
    """Find and run the command, or print help, the version or completions. Adds to `places`."""
    if (typed := os.environ.get("_HEADSTART_COMPLETE")) is not None:
        return completion.answer(application(), typed)
    if words[:1] == ["--version"]:
        print(f"headstart {__version__}")
        return 0
    has_settings = settings.are_given(os.environ, words)  # they are checked against the options of all commands
    root = application(words[:1] if words and words[0] in COMMANDS and not has_settings else COMMANDS)
    entry: Command | CommandGroup = root
    names, rest = list[str](), words
    while isinstance(entry, CommandGroup):
        if rest and rest[0] in entry.commands:
            name, rest = rest[0], rest[1:]
        elif (rest and rest[0] in HELP) or not (rest or entry.default):
            print(help_text(entry, " ".join(["headstart", *names])))
            return 0
        elif entry.default:
            name = entry.default
        else:
            what = f"option: {rest[0]}" if rest[0].startswith("-") else f"command '{rest[0]}'."
            raise UsageError(
                f"No such {what}", foreign_flags.command_hint(rest[0], COMMANDS) or "headstart --help lists all"
            )
        names.append(name)
        entry = entry.commands[name]
    return _run_command(" ".join(names), entry, rest, root, places)


def _run_command(name: str, command: Command, words: list[str], root: CommandGroup, places: dict[str, str]) -> int:
    try:
        given, help_flag = command.split(words)
        if help_flag:
            print(help_text(command, f"headstart {name}", rare=help_flag == HELP_ALL))
            return 0
        found = Settings(all_commands(root), os.environ, settings.named_file(words))
        options = settings.options_of(command)
        typed = {key for key, item in options.items() if item.name in given}
        for key, setting in found.for_command(name, typed).items():
            given[options[key].name] = setting.value
            if setting.value is not False:
                places[_spelling(options[key], setting.value)] = setting.place
        arguments = command.read(given, found)
    except ParseError as error:
        from headstart.cli.option_hints import option_hint  # it imports the tables of other engines

        hint = option_hint(error, name, command, words, lambda: all_commands(application()))
        raise UsageError(error.message, hint) from None
    return int(command.run(**arguments) or 0)


def _spelling(option: Option, value: Any) -> str:
    """Returns how errors name an option: its flag, or for the argument MODEL its value."""
    if not option.is_argument:
        return option.label
    return str(value[0] if isinstance(value, list) and value else value)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, SIGTERM and a closed terminal Terminated: files and engines are cleaned up."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in TERMINATION_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(*_: object) -> None:
    raise Terminated


def _system_error(error: Exception) -> tuple[str, str, int] | None:
    """Message, hint and exit code of a full disk, a missing right or no memory. None for other errors: bugs."""
    if isinstance(error, MemoryError):
        return "the memory is full", "close other programs, or take a smaller model, context or batch", USAGE_EXIT_CODE
    if not isinstance(error, OSError) or error.errno not in SYSTEM_HINTS:
        return None
    if error.filename is None and error.errno == errno.ENOENT:  # of os.getcwd(); other errors name a file
        return "the working directory no longer exists", "change to another folder", USAGE_EXIT_CODE
    if error.filename is None and error.errno not in WRITE_HINTS:
        return None
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else "cannot write: "
    return f"{where}{error.strerror}", SYSTEM_HINTS[error.errno], USAGE_EXIT_CODE


def _internal_error(error: Exception) -> tuple[str, str, int]:
    """Message, hint and exit code of a bug. Prints its traceback if TRACEBACK_VARIABLE is set."""
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exc()
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}:{where.lineno}"
    hint = f"{TRACEBACK_VARIABLE}=1 shows the trace; please report it"
    return f"internal error: {type(error).__name__}: {error} ({place})", hint, INTERNAL.exit_code
