"""`headstart completion`: scripts for shells, and the completions that these scripts ask for."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from headstart.cli.help import options_of, summary
from headstart.cli.parser import HELP, Command, CommandGroup, command
from headstart.options import REQUIRED, OptionGroup, argument

SCRIPTS = {
    "bash": """\
_headstart_completion() {
    local IFS=$'\\n'
    COMPREPLY=( $( _HEADSTART_COMPLETE="bash ${COMP_LINE:0:COMP_POINT}" $1 ) )
}

complete -o default -F _headstart_completion headstart""",
    "zsh": """\
#compdef headstart

_headstart_completion() {
  eval "$( _HEADSTART_COMPLETE="zsh ${words[1,$CURRENT]}" headstart )"
}

compdef _headstart_completion headstart""",
    "fish": """\
complete --command headstart --arguments '(_HEADSTART_COMPLETE="fish $(commandline -cp)" headstart)'""",
}
HELP_WIDTH = 45


@dataclass(frozen=True, kw_only=True)
class CompletionOptions(OptionGroup):
    """The shell."""

    shell: str = argument("bash, zsh or fish.", default=REQUIRED, choices=tuple(SCRIPTS))


@command("headstart completion bash", "headstart completion fish")
def run(options: CompletionOptions) -> int:
    """Print a script that completes commands, options and models, to be sourced by the shell.

    bash: in ~/.bashrc, eval "$(headstart completion bash)". fish: a file in ~/.config/fish/completions."""
    print(SCRIPTS[options.shell])
    return 0


def answer(root: CommandGroup, request: str) -> int:
    """Print the completions for the value of _HEADSTART_COMPLETE, which the scripts set: shell, space, and the command
    line up to the cursor. Returns the exit code."""
    shell, _, line = request.partition(" ")
    words = _split(line)[1:]
    last = words.pop() if words and not line.endswith(" ") else ""
    found = [(value, text) for value, text in _completions(root, words, last) if value.startswith(last)]
    if shell == "zsh":
        pairs = [f'"{_zsh(value)}":"{_zsh(text)}"' if text else f'"{_zsh(value)}"' for value, text in found]
        print(f"_arguments '*: :(({chr(10).join(pairs)}))'" if pairs else "_files")
    else:
        for value, text in found:
            print(f"{value}\t{' '.join(text.split())}" if shell == "fish" and text else value)
    return 0


def _completions(root: CommandGroup, words: list[str], last: str) -> Iterator[tuple[str, str]]:
    """Words that may replace `last`, after `words`, with their descriptions."""
    entry: Command | CommandGroup = root
    while isinstance(entry, CommandGroup) and words and words[0] in entry.commands:
        entry = entry.commands[words.pop(0)]
    if isinstance(entry, CommandGroup) and not words and not last.startswith("-"):
        for name, each in entry.commands.items():
            yield name, textwrap.shorten(summary(each), HELP_WIDTH, placeholder="...")
        return
    options = options_of(entry)
    before = next((item for item in options if words and words[-1] in item.flags), None)
    if before and not before.is_switch:
        yield from ((choice, "") for choice in before.choices)
    elif last.startswith("-"):
        for item in options:
            if not item.is_hidden and (item.is_list or not set(item.flags) & set(words)):
                yield from ((flag, item.help) for flag in item.flags)
        yield from ((flag, "Show this message.") for flag in HELP)
    else:
        for item in options:
            if item.is_argument and item.complete:
                yield from ((value, "") for value in item.complete())


def _split(line: str) -> list[str]:
    """Returns the words of a shell line, whose last quote may be open."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = []
    try:
        for word in lexer:
            words.append(word)
    except ValueError:  # an open quote at the end
        words.append(lexer.token)
    return words


def _zsh(text: str) -> str:
    return re.sub(r"[$`]", r"\\\g<0>", text.replace('"', '""').replace("'", "''")).replace(":", r"\\:")
