"""vLLM's old ways to say how it drafts, into the one JSON of today."""

from __future__ import annotations

import json
import re
from typing import Any

from headstart.errors import UsageError
from headstart.tools.launch.commands import CommandLine, Word
from headstart.tools.launch.published import published
from headstart.tools.launch.versions import Version, at_least

OPTION = "--speculative-config"
DOTTED = f"{OPTION}."
"""vLLM takes keys of its JSON one by one too."""
VARIABLE = re.compile(r"\$\{?\w+\}?")
GONE_METHODS = {"medusa": "0.33", "mlp_speculator": "0.33"}
FOLDED = {
    "--speculative-model": ("model", str),
    "--num-speculative-tokens": ("num_speculative_tokens", int),
    "--ngram-prompt-lookup-max": ("prompt_lookup_max", int),
    "--ngram-prompt-lookup-min": ("prompt_lookup_min", int),
    "--speculative-draft-tensor-parallel-size": ("draft_tensor_parallel_size", int),
    "--speculative-model-quantization": ("quantization", str),
    "--speculative-disable-by-batch-size": ("disable_by_batch_size", int),
}
"""V0's flags -> keys of the JSON and their types."""
NUMBERS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size")
KINDS = ("eagle3", "eagle", "dflash", "dspark", "medusa", "mtp")
"""Words by which a drafter's name says its kind."""
MOVED_CONNECTORS = {"SharedStorageConnector": "ExampleConnector"}


def modernize(line: CommandLine, version: Version) -> None:
    word = line.find(OPTION)
    if word and word.value and VARIABLE.fullmatch(word.value):
        beside = [each.flag for each in line.words if each.flag in FOLDED or each.flag.startswith(DOTTED)]
        line.warnings += [f"{flag} belongs into {word.value}, which is not known here" for flag in beside]
        return
    before = _read(word)
    config = dict(before)
    _dotted(line, config)
    _fold(line, config)
    _keys(line, config, version)
    _methods(line, config, version)
    if config != before:
        text = _dumped(config)
        if word:
            word.flag, word.value = OPTION, text
        else:
            line.put(OPTION, text)
    elif word and word.flag != OPTION and word.value is not None:
        line.rename(word.flag, OPTION)
    _connector(line, version)


def _read(word: Word | None) -> dict[str, Any]:
    """The JSON that is there; the shell's variables in it as text. Raises UsageError for what is none."""
    if word is None or not word.value:
        return {}
    text = word.value
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        try:
            given = json.loads(re.sub(r"(?<=[:\s,\[])(\$\{?\w+\}?)(?=[\s,}\]])", r'"\1"', text))
        except json.JSONDecodeError:
            hint = "quote it with '...' in the shell"
            raise UsageError(f"{OPTION} is not valid JSON: {error}", hint) from None
    if not isinstance(given, dict):
        raise UsageError(f"{OPTION} is no JSON object", """for example '{"method": "mtp"}'""")
    return given


def _dumped(config: dict[str, Any]) -> str:
    """JSON in which numbers may be the shell's: "$K" without quotes."""
    text = json.dumps(config, ensure_ascii=False)
    for key in NUMBERS:
        text = re.sub(rf'("{key}": )"({VARIABLE.pattern})"', r"\1\2", text)
    return text


def _dotted(line: CommandLine, config: dict[str, Any]) -> None:
    for word in [each for each in line.words if each.flag.startswith(DOTTED)]:
        line.remove(word)
        try:
            value = json.loads(word.value or "")
        except json.JSONDecodeError:
            value = word.value or ""
        config[word.flag.removeprefix(DOTTED)] = value
        line.changes.append(f"{' '.join(word.text())} -> {OPTION}")


def _fold(line: CommandLine, config: dict[str, Any]) -> None:
    for flag, (key, kind) in FOLDED.items():
        word = line.take(flag, flag.replace("-", "_").replace("__", "--", 1))
        if word is None or word.value is None:
            continue
        try:
            value = word.value if VARIABLE.fullmatch(word.value) else kind(word.value)
        except ValueError:
            raise UsageError(f"{flag} is {word.value!r}, which is not a number", "for example 3") from None
        if config.get(key, value) != value:
            line.warnings.append(f"{flag} {value} and {json.dumps(config[key])} in {OPTION} say two things: choose one")
        config.setdefault(key, value)
        line.changes.append(f"{flag} {word.value} -> {key} in {OPTION}")


def _keys(line: CommandLine, config: dict[str, Any], version: Version) -> None:
    for flag, (key, _) in FOLDED.items():  # names of flags as keys
        old = flag[2:].replace("-", "_")
        if old != key and old in config and key not in config:
            config[key] = config.pop(old)
            line.changes.append(f'"{old}" -> "{key}"')
    if "tensor_parallel_size" in config:
        config["draft_tensor_parallel_size"] = config.pop("tensor_parallel_size")
        line.changes.append('"tensor_parallel_size" -> "draft_tensor_parallel_size"')
    if "speculative_token_tree" in config:
        del config["speculative_token_tree"]
        line.changes.append('"speculative_token_tree" removed: drafts are chains')
    if "disable_by_batch_size" in config and at_least(version, "0.24"):
        _by_batch(line, config)
    rows = config.get("num_speculative_tokens_per_batch_size")
    if isinstance(rows, dict):
        line.warnings.append("num_speculative_tokens_per_batch_size is a list [[from, to, depth], ...], not an object")
    data = line.find("--data-parallel-size")
    if rows and data and data.value not in (None, "1"):
        line.warnings.append("a depth by batch size is ignored with data parallelism")


def _by_batch(line: CommandLine, config: dict[str, Any]) -> None:
    most, depth = config.pop("disable_by_batch_size"), config.get("num_speculative_tokens", 1)
    if not isinstance(most, int) or not isinstance(depth, int):
        line.warnings.append("the switch-off by batch size is a table now: num_speculative_tokens_per_batch_size")
        return
    table = [[1, most, depth], [most + 1, max(most + 1, 1024), 0]]
    config["num_speculative_tokens_per_batch_size"] = table
    line.changes.append(f'"disable_by_batch_size": {most} -> "num_speculative_tokens_per_batch_size": {table}')


def _methods(line: CommandLine, config: dict[str, Any], version: Version) -> None:
    method, model = str(config.get("method", "")), str(config.get("model", ""))
    if not method and not model and "num_speculative_tokens" in config:
        config["method"] = "mtp"
        line.changes.append('"method": "mtp" added: without a model it was the checkpoint\'s own heads')
    if model == "[ngram]":
        del config["model"]
        config["method"] = "ngram"
        line.changes.append('model "[ngram]" -> "method": "ngram"')
        if method not in ("", "ngram"):
            line.warnings.append(f'model "[ngram]" and "method": "{method}" are two drafters: choose one')
        return
    if re.fullmatch(r"[\w.]*-?mtp", model, re.IGNORECASE) and method in ("", "mtp"):
        del config["model"]
        config["method"] = method = "mtp"
        line.changes.append(f'model "{model}" -> "method": "mtp": the heads are in the checkpoint')
        model = ""
    if method.endswith("_mtp") and at_least(version, "0.11"):
        config["method"] = "mtp"
        line.changes.append(f'"method": "{method}" -> "mtp"')
    if method in GONE_METHODS and at_least(version, GONE_METHODS[method]):
        line.warnings.append(f"{method} is gone since {GONE_METHODS[method]}, and nothing takes such heads")
    named = next((kind for kind in KINDS if kind in model.lower()), "")
    plain = "mtp" if method.endswith("mtp") else method
    if named and plain and named != plain and {named, plain} != {"eagle", "eagle3"}:
        line.warnings.append(f'"method": "{method}" and the model "{model}" are two kinds of drafters: choose one')


def _connector(line: CommandLine, version: Version) -> None:
    """The class that a KV connector is called by."""
    word, known = line.find("--kv-transfer-config"), published("vllm")
    for old, new in MOVED_CONNECTORS.items():
        there = known is not None and known.has(f"kv_transfer_config.kv_connector={new}", version)
        if word and word.value and old in word.value and there:
            word.value = word.value.replace(old, new)
            line.changes.append(f"{old} -> {new}: it only shows how a connector is made; for work take NixlConnector")
