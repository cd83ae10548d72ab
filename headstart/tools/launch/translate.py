"""Translates old engine command lines: flags and values are updated, all other shell text stays unchanged."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import PurePath

from headstart import registry
from headstart.core import Report
from headstart.errors import UsageError
from headstart.formats.json_object import read_packaged
from headstart.tools.launch.arguments import Version, check_arguments, parse_version, published, table_for, version_text
from headstart.tools.launch.command_line import (
    CommandLine,
    Edit,
    ShellToken,
    apply_edits,
    commands,
    plain_typography,
    quoted,
)
from headstart.tools.launch.launcher import EngineLauncher, launchers, other_engine_hint

OLD_METRICS = {
    "spec_decode_draft_acceptance_rate": "acceptance rate = accepted / draft tokens",
    "spec_decode_efficiency": "tokens of a pass = 1 + accepted tokens / drafts",
}
"""Metric of vLLM V0 -> formula with the counters of V1."""


@dataclass
class Translation:
    text: str
    engine_version: str | None  # as the user named it
    program: str | None  # --program
    engines: dict[str, Version] = field(default_factory=dict)  # engine found in the text -> target version
    assumed: bool = False  # no version was named or installed
    changes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # decisions that are left to the user
    edits: list[Edit] = field(default_factory=list)  # of `text`

    def report(self) -> Report:
        """Returns the report; `ok` is false if there are warnings."""
        (engine, version), *_ = [*self.engines.items(), (None, None)]
        data = {
            "engine": engine, "version": version_text(version) if version else None, "version_assumed": self.assumed,
            "command": self.text, "changes": self.changes, "warnings": self.warnings,
        }  # fmt: skip
        lines = [self.text, *(f"# {change}" for change in self.changes or ["nothing to change"])]
        return Report(not self.warnings, data, [*lines, *(f"# WARNING: {warning}" for warning in self.warnings)])


def translate_text(text: str, engine_version: str | None, program: str | None = None) -> Translation:
    """Translates all known commands of a text. Raises UsageError if there is none, or for an unclosed quote."""
    done = Translation(plain_typography(text), engine_version, program)
    if done.text != text:
        done.changes.append("typographic quotes, dashes and blanks -> those of a shell")
    for tokens in commands(done.text):
        _translate_command(done, tokens)
    if not done.engines and re.search(r"^\s*speculative_config:\s*$", done.text, re.MULTILINE):
        _translate_config(done)
    if not done.engines and not done.changes and not done.warnings:
        raise _unknown_text(text)
    done.text = apply_edits(done.text, done.edits)
    return done


def _translate_command(done: Translation, tokens: Sequence[ShellToken]) -> None:
    if (place := _script_place(tokens)) is not None:
        _replace_script(done, tokens, place)
    elif found := find_engine(tokens):
        launcher, begin = found
        installed = launcher.find_installed(done.program) if done.engine_version is None else None
        version, assumed = launcher.choose_version(done.engine_version, installed)
        done.engines[launcher.name], done.assumed = version, done.assumed or assumed
        has_model = launcher.model_first or tokens[begin].value == "serve"
        line = CommandLine.parse(done.text, tokens, begin, table_for(launcher.name, version), has_model=has_model)
        modernize(line, launcher, version)
        done.changes += line.changes
        done.warnings += line.warnings
        done.edits += line.edits()
    else:
        _rename_metrics(done, tokens)
        _translate_nested(done, tokens)


def _translate_config(done: Translation) -> None:
    launcher: EngineLauncher = registry.find("launchers", "trtllm").LAUNCHER
    version, done.assumed = launcher.choose_version(done.engine_version, launcher.find_installed(done.program))
    done.engines["trtllm"] = version
    done.text, changes, warnings = launcher.modernize_config(done.text, version)
    done.changes += changes
    done.warnings += warnings


def _rename_metrics(done: Translation, tokens: Sequence[ShellToken]) -> None:
    for token, (name, how) in product(tokens, OLD_METRICS.items()):
        if name in token.value:
            place = done.text.index(name, token.begin)
            done.edits.append((place, place + len(name), "spec_decode_num_"))
            done.changes.append(f"{name} -> spec_decode_num_ (vLLM shows counters since V1): {how}")


def _translate_nested(done: Translation, tokens: Sequence[ShellToken]) -> None:
    for token in tokens:
        if not re.search(r"\s", token.value) or not _has_command(token.value):
            continue
        inner = translate_text(token.value, done.engine_version, done.program)
        done.engines |= inner.engines
        done.assumed = done.assumed or inner.assumed
        done.changes += inner.changes
        done.warnings += inner.warnings
        done.edits.append((token.begin, token.end, quoted(inner.text, expands=not token.plain)))


def _has_command(text: str) -> bool:
    try:
        return any(_script_place(tokens) is not None or find_engine(tokens) for tokens in commands(text))
    except UsageError:
        return False


@dataclass(frozen=True)
class LegacyScript:
    """An old script of an engine's repository that guides still name (legacy_scripts.json)."""

    program: str  # the command that replaces the script
    flags: Mapping[str, str] = field(default_factory=dict)  # old flag -> new; "": its value becomes positional
    adds: str = ""  # arguments to append
    gone: Mapping[str, str] = field(default_factory=dict)  # flag without a successor -> warning for the user


@cache
def _scripts() -> Mapping[str, LegacyScript]:
    rows = read_packaged("headstart.tools.launch", "legacy_scripts.json")
    return {name: LegacyScript(**row) for name, row in rows.items()}


def _script_place(tokens: Sequence[ShellToken]) -> int | None:
    return next((place for place, token in enumerate(tokens) if PurePath(token.value).name in _scripts()), None)


def _replace_script(done: Translation, tokens: Sequence[ShellToken], place: int) -> None:
    name = PurePath(tokens[place].value).name
    script = _scripts()[name]
    is_run_by_python = place and PurePath(tokens[place - 1].value).name.startswith("python")
    begin = tokens[place - 1 if is_run_by_python else place].begin
    done.edits.append((begin, tokens[place].end, script.program))
    for index, token in enumerate(tokens[place + 1 :], place + 1):
        flag, equals, _ = token.value.partition("=")
        if flag in script.gone:
            done.warnings.append(f"{flag}: {script.gone[flag]}")
        elif script.flags.get(flag):
            done.edits.append((token.begin, token.begin + len(flag), script.flags[flag]))
        elif flag in script.flags:
            end = token.begin + len(flag) + 1 if equals or index + 1 == len(tokens) else tokens[index + 1].begin
            done.edits.append((token.begin, end, ""))
    if script.adds:
        done.edits.append((tokens[-1].end, tokens[-1].end, f" {script.adds}"))
    done.changes.append(f"{name} -> {script.program}")


def find_engine(tokens: Sequence[ShellToken]) -> tuple[EngineLauncher, int] | None:
    """Returns the engine of a command, and the index of the token before its arguments: the program, the subcommand
    `serve` or the container image. None for a command of no known engine."""
    image: tuple[EngineLauncher, int] | None = None
    for place, token in enumerate(tokens):
        if image and token.value.startswith("--"):
            return image
        for launcher in launchers().values():
            programs = {launcher.program, *launcher.modules}
            if PurePath(token.value).name in programs and not token.value.startswith("-"):
                subcommand = tokens[place + 1].value if len(tokens) > place + 1 else ""
                if subcommand == "serve":
                    return launcher, place + 1
                if token.value in launcher.modules or not launcher.has_subcommands:
                    return launcher, place
            if image is None and _repository(token.value) in launcher.repositories():
                image = launcher, place
    return image


def _repository(word: str) -> str:  # NAME of an image NAME:TAG or NAME:TAG@DIGEST
    return word.partition("@")[0].rpartition(":")[0] or word


def modernize(line: CommandLine, launcher: EngineLauncher, version: Version) -> None:
    """Updates a command line in place: renames, removes or merges arguments that this version lacks. Adds warnings for
    arguments that the version would refuse."""
    known = published(launcher.name)
    for old, new in launcher.renamed.items():
        if known is None or known.has(new.partition(".")[0], version):
            line.rename(old, new)
    if table := table_for(launcher.name, version):
        line.drop_boolean_values(table)
    launcher.modernize(line, version)
    for flag, why in launcher.removed.items():
        if known is None or not known.has(flag, version):
            line.drop(flag, why, switch=flag in launcher.switches)
    _update_image(line, launcher, version)
    words = [part for word in line.words for part in word.text()]
    has_model = launcher.model_first or (line.prefix and line.prefix[-1].value == "serve")
    check = check_arguments(launcher, version, words, num_positional=int(bool(has_model)))
    line.warnings += [each for each in check.errors if each not in line.warnings]
    line.changes += [f"note: {each}" for each in check.notes]


def _update_image(line: CommandLine, launcher: EngineLauncher, version: Version) -> None:
    """Changes the tag of a container image to the version that the flags are written for."""
    for token in line.prefix:
        name, tag = _repository(token.value), token.value.rpartition(":")[2]
        if name not in launcher.repositories() or "@" in token.value:
            continue
        moved = launcher.moved_images.get(name, name)
        number = re.search(r"(?<![\d.])v?b?(\d+(?:\.\d+)+|\d{4,})", tag)
        if number and parse_version(number[1]) != version:
            tag = tag.replace(number[1], version_text(version))
        if (new := f"{moved}:{tag}" if ":" in token.value else moved) != token.value:
            line.edited.append((token.begin, token.end, new))
            line.changes.append(f"{token.value} -> {new}")


def _unknown_text(text: str) -> UsageError:
    if re.search(r"decoding_type\W+(MEDUSA|LOOKAHEAD|REDRAFTER)", text, re.IGNORECASE):
        what = "--translate: that decoding type is of TensorRT-LLM's old engines; a model's own MTP heads are"
        today = "speculative_config: {decoding_type: MTP, max_draft_len: 3} in the file of --extra_llm_api_options"
        return UsageError(f"{what}: {today}", "headstart launch trtllm MODEL --dry-run writes it")
    for word in re.findall(r"[\w.-]+", text):
        if hint := other_engine_hint(word):
            return UsageError(f"--translate: {word} has no launcher here", hint)
    known = ", ".join(registry.available("launchers"))
    if re.search(r"""[\["']--\w|^\s*- """, text):
        known += "; words of a list (YAML, CMD [...]) are read as one shell line"
    return UsageError(f"--translate: {text.strip()[:60]!r} is not the command of a known engine", f"known: {known}")
