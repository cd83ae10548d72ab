"""Old command lines into current ones: flags and values are replaced, the shell's own text stays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import PurePath

from headstart import registry
from headstart.errors import UsageError
from headstart.tools.launch.checked import check_words, definitions_of
from headstart.tools.launch.commands import CommandLine, Edit, applied
from headstart.tools.launch.detect import find_installed
from headstart.tools.launch.launcher import Launcher
from headstart.tools.launch.published import published
from headstart.tools.launch.scripts import is_script, rewritten
from headstart.tools.launch.shell import Token, commands, quoted, unpasted
from headstart.tools.launch.versions import Version, parse, text_of


@dataclass
class Translated:
    """A text with its commands brought up to date. `engines`: name -> version it was written for."""

    text: str
    engines: dict[str, Version] = field(default_factory=dict)
    assumed: bool = False
    changes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def checked(self) -> bool:
        return not self.warnings


def translate_text(text: str, engine_version: str | None, program: str | None) -> Translated:
    """Raises UsageError for a text without the command of a known engine, or with a quote that does not end."""
    done = Translated(unpasted(text))
    if done.text != text:
        done.changes.append("typographic quotes, dashes and blanks -> those of a shell")
    edits: list[Edit] = []
    for tokens in commands(done.text):
        edits += _command(done, tokens, engine_version, program)
    if not done.engines and not done.changes and not done.warnings:
        _answer(text)
    done.text = applied(done.text, edits)
    return done


def _command(done: Translated, tokens: Sequence[Token], engine_version: str | None, program: str | None) -> list[Edit]:
    """What changes in one command of the text."""
    if is_script(tokens):
        edits, changes, warnings = rewritten(done.text, tokens)
        done.changes += changes
        done.warnings += warnings
        return edits
    found = find_engine(tokens)
    if found is None:
        return [*_metrics(done, tokens), *_inside(done, tokens, engine_version, program)]
    launcher, begin = found
    version, assumed = _version(launcher, engine_version, program)
    done.engines[launcher.name], done.assumed = version, done.assumed or assumed
    known = definitions_of(launcher.name, version)
    positional = launcher.model_first or tokens[begin].value == "serve"
    line = CommandLine.parse(done.text, tokens, begin, known, model=positional)
    modernize(line, launcher, version)
    done.changes += line.changes
    done.warnings += line.warnings
    return line.edits()


GAUGES = {
    "spec_decode_draft_acceptance_rate": "acceptance rate = accepted / draft tokens",
    "spec_decode_efficiency": "tokens of a pass = 1 + accepted tokens / drafts",
}
"""vLLM's metrics of before V1 -> how today's counters give them."""


def _metrics(done: Translated, tokens: Sequence[Token]) -> list[Edit]:
    edits = []
    for token, (name, how) in product(tokens, GAUGES.items()):
        if name in token.value:
            place = done.text.index(name, token.begin)
            edits.append((place, place + len(name), "spec_decode_num_"))
            done.changes.append(f"{name} -> spec_decode_num_ (vLLM shows counters since V1): {how}")
    return edits


def _inside(done: Translated, tokens: Sequence[Token], engine_version: str | None, program: str | None) -> list[Edit]:
    """Commands within a word, as in bash -c '...'."""
    edits = []
    for token in tokens:
        if not re.search(r"\s", token.value) or not _mentions(token.value):
            continue
        inner = translate_text(token.value, engine_version, program)
        done.engines |= inner.engines
        done.assumed = done.assumed or inner.assumed
        done.changes += inner.changes
        done.warnings += inner.warnings
        edits.append((token.begin, token.end, quoted(inner.text, expands=not token.plain)))
    return edits


def _mentions(text: str) -> bool:
    try:
        return any(is_script(tokens) or find_engine(tokens) for tokens in commands(text))
    except UsageError:
        return False


def _version(launcher: Launcher, named: str | None, program: str | None) -> tuple[Version, bool]:
    if named is not None:
        return parse(named), False
    installed = find_installed(launcher, program)
    if installed is not None and installed.version is not None:
        return installed.version, False
    return parse(launcher.newest), True


def launchers() -> list[Launcher]:
    return [registry.find("launchers", name).LAUNCHER for name in registry.available("launchers")]


def find_engine(tokens: Sequence[Token]) -> tuple[Launcher, int] | None:
    """Whose command it is, and the place of the last word before its arguments: the program, its subcommand, or the
    image of its container."""
    image: tuple[Launcher, int] | None = None
    for place, token in enumerate(tokens):
        if image and token.value.startswith("--"):
            return image
        for launcher in launchers():
            names = {launcher.program, *launcher.modules}
            if PurePath(token.value).name in names and not token.value.startswith("-"):
                subcommand = tokens[place + 1].value if len(tokens) > place + 1 else ""
                if subcommand == "serve":
                    return launcher, place + 1
                if token.value in launcher.modules or not launcher.serves_by_name:
                    return launcher, place
            if image is None and _repository(token.value) in launcher.repositories():
                image = launcher, place
    return image


def _repository(word: str) -> str:
    return word.partition("@")[0].rpartition(":")[0] or word


def modernize(line: CommandLine, launcher: Launcher, version: Version) -> None:
    """Rename, drop and fold what this version no longer has; then say what it would refuse."""
    known = published(launcher.name)
    for old, new in launcher.renamed.items():
        if known is None or known.has(new.partition(".")[0], version):
            line.rename(old, new)
    if definitions := definitions_of(launcher.name, version):
        line.unvalue(definitions)
    launcher.modernize(line, version)
    for flag, why in launcher.removed.items():
        if known is None or not known.has(flag, version):
            line.drop(flag, why, switch=flag in launcher.switches)
    _image(line, launcher, version)
    words = [part for word in line.words for part in word.text()]
    serving = launcher.model_first or (line.prefix and line.prefix[-1].value == "serve")
    checked = check_words(launcher, version, words, positional=int(bool(serving)))
    line.warnings += [each for each in checked.errors if each not in line.warnings]
    line.changes += [f"note: {each}" for each in checked.notes]


def _image(line: CommandLine, launcher: Launcher, version: Version) -> None:
    """A container of another version gets the one that the flags are for."""
    for token in line.prefix:
        name, tag = _repository(token.value), token.value.rpartition(":")[2]
        if name not in launcher.repositories() or "@" in token.value:
            continue
        moved = launcher.moved.get(name, name)
        number = re.search(r"(?<![\d.])v?b?(\d+(?:\.\d+)+|\d{4,})", tag)
        if number and parse(number[1]) != version:
            tag = tag.replace(number[1], text_of(version))
        if (new := f"{moved}:{tag}" if ":" in token.value else moved) != token.value:
            line.replace(token, new)
            line.changes.append(f"{token.value} -> {new}")


STALE = {
    r"decoding_type\W+(MEDUSA|LOOKAHEAD|REDRAFTER)": (
        "that decoding type is of TensorRT-LLM's old engines; a model's own MTP heads are",
        "speculative_config: {decoding_type: MTP, max_draft_len: 3} in the file of --extra_llm_api_options",
    ),
}
"""Texts that are no commands -> what is wrong with them, and what does their work."""


def _answer(text: str) -> None:
    for pattern, (what, instead) in STALE.items():
        if re.search(pattern, text, re.IGNORECASE):
            raise UsageError(f"--translate: {what}: {instead}", "headstart launch trtllm MODEL --dry-run writes it")
    known = ", ".join(registry.available("launchers"))
    if re.search(r"""[\["']--\w|^\s*- """, text):
        known += "; words of a list (YAML, CMD [...]) are read as one shell line"
    raise UsageError(f"--translate: {text.strip()[:60]!r} is the command of no known engine", f"known: {known}")
