"""`serve`'s words as vLLM spells them: its short names, underscores, sizes, former flags, and all its flags that are no
options here, so that each is honoured or refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from headstart.cli.help import ALL, NAMES, Command
from headstart.errors import UsageError

OTHER = "--vllm"
"""Hidden: a flag of vLLM's that is no option here, as NAME or NAME=VALUE."""
ENGINE = "--engine"
THEIRS = {"--quantization", "--kv-cache-dtype", "--dtype", "--device", "--max-model-len", "--block-size"}
"""Options whose values are another engine's where one is named."""
DEFAULTS = {"--quantization": "none", "--kv-cache-dtype": "auto", "--dtype": "auto", "--max-model-len": "auto"}
"""Values of vLLM's that say what happens without the option."""
SIZED = ("--max-model-len", "--max-num-batched-tokens")
SIZES = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
SPECULATIVE = "--speculative-config"
FOLDED: Mapping[str, tuple[str, type]] = {
    "--speculative-model": ("model", str),
    "--num-speculative-tokens": ("num_speculative_tokens", int),
    "--ngram-prompt-lookup-max": ("prompt_lookup_max", int),
    "--ngram-prompt-lookup-min": ("prompt_lookup_min", int),
    "--spec-method": ("method", str),
    "--spec-model": ("model", str),
    "--spec-tokens": ("num_speculative_tokens", int),
}
"""Flags that say one key of the JSON each."""


class ServeCommand(Command):
    """`serve`, which takes vLLM's command lines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        own = {flag: not getattr(item, "is_flag", False) for item in self.params for flag in item.opts}
        own |= dict.fromkeys((*NAMES, ALL), False)
        return super().parse_args(ctx, rewritten(args, own))


def rewritten(args: list[str], own: Mapping[str, bool]) -> list[str]:
    """The words with vLLM's spellings as options of `own` (flag -> does it take a value?), or under OTHER. Raises
    UsageError for what contradicts itself."""
    return _Words(args, own).read()


class _Words:
    def __init__(self, args: list[str], own: Mapping[str, bool]) -> None:
        self.rest, self.own = list(args), own
        self.elsewhere = any(word.partition("=")[0] == ENGINE for word in args)
        self.found: list[str] = []
        self.speculative: dict[str, Any] = {}

    def read(self) -> list[str]:
        while self.rest:
            word = self.rest.pop(0)
            if word == "--":
                self.found += [word, *self.rest]
                break
            if not word.startswith("-"):
                self.found.append(word)
                continue
            flag, equals, value = word.partition("=")
            self._one(flag.replace("_", "-") if flag.startswith("--") else flag, value if equals else None, word)
        if self.speculative:
            if any(word.partition("=")[0] == SPECULATIVE for word in self.found):
                raise UsageError(f"{SPECULATIVE} and flags for its keys are both given", "give one of them")
            self.found += [SPECULATIVE, json.dumps(self.speculative)]
        return self.found

    def _one(self, flag: str, value: str | None, word: str) -> None:
        if flag in self.own and not (self.elsewhere and flag in THEIRS):
            self._ours(flag, value)
        elif flag in FOLDED:
            self._fold(flag, self._value(flag, value))
        elif flag.startswith(f"{SPECULATIVE}."):
            self.speculative[flag.partition(".")[2].replace("-", "_")] = _plain(self._value(flag, value))
        elif name := vllm_name(flag):
            self._theirs(flag, name, value)
        else:
            self.found.append(word)

    def _ours(self, flag: str, value: str | None) -> None:
        if self.own[flag] and value is None:
            value = self.rest.pop(0) if self.rest else None
        if value is None:
            self.found.append(flag)
            return
        if value.lower() == DEFAULTS.get(flag) or (flag == "--max-model-len" and value == "-1"):
            return
        if flag in SIZED:
            value = plain_size(value)
        self.found += [flag, value] if self.own[flag] else [f"{flag}={value}"]

    def _theirs(self, flag: str, name: str, value: str | None) -> None:
        """A flag of vLLM's: another spelling of an option here, or one that is none."""
        if name == "--model":
            self.found.append(self._value(flag, value))
            return
        takes = _takes_value(name)
        if takes and value is None:
            value = self._value(flag, None)
        if name in self.own and not (self.elsewhere and name in THEIRS):
            self._ours(name, value)
        else:
            self.found += [OTHER, name if value is None else f"{name}={value}"]

    def _fold(self, flag: str, value: str) -> None:
        key, kind = FOLDED[flag]
        if (key, value) == ("model", "[ngram]"):
            key, value = "method", "ngram"
        if kind is int and not value.isdigit():
            raise UsageError(f"{flag} is {value!r}, which is not a number", "for example 3")
        self.speculative[key] = kind(value)

    def _value(self, flag: str, value: str | None) -> str:
        if value is None:
            value = self.rest.pop(0) if self.rest else None
        if value is None:
            raise UsageError(f"{flag} needs a value", "headstart serve --help-all lists what it may be")
        return value


def plain_size(text: str) -> str:
    """32k is 32000, and 32K 32768."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text)
    return str(int(float(size[1]) * SIZES[size[2]])) if size else text


def vllm_name(flag: str) -> str:
    """The first name of a flag of vLLM's (with its --no-), or of one that it has had; empty for other words."""
    from headstart.tools.launch.definitions import definitions
    from headstart.tools.launch.launchers.vllm import REMOVED

    known = definitions("vllm")
    assert known is not None
    base = flag.partition(".")[0]
    if base in known.aliases:
        return known.aliases[base]
    positive = base.replace("--no-", "--", 1)
    exact = base in known.kinds or base in REMOVED or (positive != base and known.kinds.get(positive) == "boolean")
    return flag if exact else ""


def _takes_value(name: str) -> bool:
    from headstart.tools.launch.definitions import definitions
    from headstart.tools.launch.launchers.vllm import SWITCHES

    known = definitions("vllm")
    assert known is not None
    kind = known.kinds.get(name.partition(".")[0])
    return kind not in ("switch", "boolean") and not name.startswith("--no-") and name not in SWITCHES


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
