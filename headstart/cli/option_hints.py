"""Hints for refused options: what to type here instead of another program's flag or whole command line."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import takewhile

from headstart import registry
from headstart.cli.foreign_flags import EXTRA_ARGUMENT, FILE_IN_REPO, MIN_SIMILARITY, MODEL, NOT_NEEDED, counterparts
from headstart.cli.parser import Command
from headstart.cli.vllm_flags import FLAGS, hint_of, vllm_name, with_dashes
from headstart.config import MAX_DEPTH
from headstart.errors import UsageError
from headstart.options import ParseError
from headstart.tools.launch.arguments import FLAG, SWITCHES, ArgumentTable, argument_table

Commands = Mapping[str, Command]  # by full name
VALUES: Mapping[str, tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]] = {
    "--drafter": ((r"(?i)(?:.*,)?ngram.*", "ngram"), (r".*", "")),  # the head decides: auto
    "--max-model-len": ((r"0", ""),),
    "--max-num-seqs": ((r"-1", ""),),
    "--kv-cache-dtype": ((r"(?i)q\d.*", "int8"), (r"bf16", "bfloat16"), (r"f32", "float32"), (r"f16|auto", "")),
    "--depth": ((r"\d+", lambda number: str(min(int(number[0]), MAX_DEPTH))),),
}
"""Our options -> (pattern of another engine's value, our value); empty: the default, so the option is left out."""


def option_hint(
    error: ParseError, name: str, command: Command, words: Sequence[str], all_commands: Callable[[], Commands]
) -> str:
    """What to type instead of the `words` that a command refused; empty if nothing is known."""
    if not error.flag:
        return error.hint or (EXTRA_ARGUMENT.get(name, "leave them out") if error.is_extra else "")
    own = {flag for flag, item in command.flags.items() if not item.is_hidden}
    flag = error.flag.replace("_", "-")
    if flag in own:
        return f"write {flag}"
    if flag in ("--host", "--port") and "--url" in own:
        return "write --url http://HOST:PORT"
    if line := _translated(words, name, command):
        return line
    meant = counterparts(flag, command)
    if MODEL in meant:
        return f"the model has no flag: headstart {name} MODEL"
    if meant:
        return f"write {' or '.join(meant)}"
    if flag in ("-p", "--prompt"):
        return "headstart generate MODEL --prompt TEXT"
    if hint := NOT_NEEDED.get(flag) or _known_hint(flag, all_commands):
        return hint
    near = get_close_matches(flag, own, n=1, cutoff=MIN_SIMILARITY)
    return f"did you mean {near[0]}?" if near else f"leave {flag} out; headstart {name} --help-all lists all options"


def _known_hint(flag: str, all_commands: Callable[[], Commands]) -> str:
    """A hint for a flag of vLLM or of other commands here; empty for other flags."""
    name = vllm_name(flag)
    if name in FLAGS:
        return FLAGS[name].hint or "leave it out"
    return _other_commands(flag, all_commands()) or (hint_of(name) if name else "")


def _other_commands(flag: str, commands: Commands) -> str:
    """A hint that names the commands with this option; empty if there are none, or many."""
    having = [name for name, each in commands.items() if flag in each.flags and not each.flags[flag].is_hidden]
    return f"{flag} is an option of headstart {' and '.join(having)}" if 1 <= len(having) <= 2 else ""


def _translated(words: Sequence[str], name: str, command: Command) -> str:
    """A hint: another engine's command line in the options of this command, with the flags that are left out; empty
    unless at least two flags are another engine's."""
    flags = {with_dashes(word.partition("=")[0]) for word in words if FLAG.match(word)}
    tables = [table for engine in registry.available("launchers") if (table := argument_table(engine))]
    table = max(tables, key=lambda each: sum(bool(each.find(flag)) for flag in flags))
    if sum(bool(table.find(flag) or counterparts(flag, command)) for flag in flags - command.flags.keys()) < 2:
        return ""
    has_model_flag = any(MODEL in counterparts(flag, command) for flag in flags)
    line = _Translation(command, table, list(words), has_model_flag)
    while line.rest:
        word = line.rest.pop(0)
        if FLAG.match(word):
            line.read_flag(word)
        else:
            line.model.append(word)
    ours = shlex.join([*line.model, *(word for option in line.options for word in option)])
    return f"write headstart {name} {ours}" + (f" (without {', '.join(line.left_out)})" if line.left_out else "")


@dataclass
class _Translation:
    """Another engine's command line in the options of a command."""

    command: Command
    table: ArgumentTable  # of the other engine
    rest: list[str]  # words that are not read yet
    has_model_flag: bool
    model: list[str] = field(default_factory=list)  # words without a flag, and values of a model flag
    options: list[list[str]] = field(default_factory=list)  # each a flag of the command, with its value
    left_out: list[str] = field(default_factory=list)  # flags of the other engine, as written

    def read_flag(self, word: str) -> None:
        """Translate a flag and its values, which are taken from `rest`."""
        written, equals, value = word.partition("=")
        flag = with_dashes(written)
        own, theirs = self.command.flags.get(flag), next(iter(self.table.find(flag)), "")
        ours = [flag] if own and not own.is_hidden else counterparts(flag, self.command)
        is_switch = own.is_switch if own else self.table.kinds.get(theirs) in SWITCHES
        values = [value] if equals else self._take(0 if is_switch else self._max_values(theirs, ours))
        text = _our_value(ours[0], values[0]) if ours and values else ""
        option = [*ours[:1], *([text] if text else [])]
        if MODEL in ours:
            self.model += values
        elif flag in FILE_IN_REPO and self.model and values:
            self.model[-1] += f"/{values[0]}"
        elif ours and (text or is_switch) and self._fits(option):
            self.options.append(option)
        else:
            self.left_out.append(written)

    def _max_values(self, theirs: str, ours: Sequence[str]) -> int:
        """The most words that a flag takes: none if it is unknown and the next word may be the model."""
        if not ours and self.table.numbers.get(theirs) in ("*", "+"):
            return len(self.rest)
        return 1 if ours or theirs or self.has_model_flag or self.model else 0

    def _take(self, most: int) -> list[str]:
        values = list(takewhile(lambda word: not FLAG.match(word), self.rest[:most]))
        del self.rest[: len(values)]
        return values

    def _fits(self, option: Sequence[str]) -> bool:
        """Whether an option is honoured, has an allowed value, and is not given yet or may be repeated."""
        flag = option[0]
        if flag in FLAGS or (any(flag == each[0] for each in self.options) and not self.command.flags[flag].is_list):
            return False
        try:
            self.command.read(self.command.split(option)[0])
        except UsageError:
            return False
        return True


def _our_value(flag: str, value: str) -> str:
    """Another engine's value, as our option `flag` writes it."""
    found = (re.sub(pattern, ours, value) for pattern, ours in VALUES.get(flag, ()) if re.fullmatch(pattern, value))
    return next(found, value)
