"""vLLM: speculation is one JSON flag; old flags, keys and method names are translated into it."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Any

from headstart.config import SPECULATIVE, SPECULATIVE_FLAGS
from headstart.errors import UsageError
from headstart.tools.launch.arguments import Version, at_least, parse_json, published
from headstart.tools.launch.command_line import ArgumentWord, CommandLine
from headstart.tools.launch.launcher import BOTH_SIDES, OFFLOAD, CommandBuilder, EngineLauncher, ServerBuilder
from headstart.tools.launch.spec import LaunchStep
from headstart.tools.plan.shape import Split, cache_bytes

MIN_CPU_CACHE_GB = 2
RAY_PORT, GROUP_PORT = 6379, 29501  # ports of Ray's head node, and of --master-port
SIDE_CHANNEL_PORT = 5600  # port of the first server's NIXL side channel (KV cache transfer)
RAY = ("--distributed-executor-backend", "ray")
WITHOUT_RAY = "0.19"  # first version that joins nodes itself and whose image has no Ray


class Vllm(EngineLauncher, data="vllm.json"):
    def build(self, server: ServerBuilder) -> None:
        facts, spec, parallel = server.facts, server.spec, server.spec.parallel
        if spec.platform == "cpu" and _asks_for_ray(spec.extra):
            hint = f"leave {RAY[0]} out: its workers on one machine are processes without Ray"
            raise UsageError("vLLM refuses Ray on a CPU: its CPU platform has no device that Ray knows", hint)
        server.add_all({"--host": spec.host, "--port": spec.port})
        server.add_sizes({"--tensor-parallel-size": parallel.tensor, "--data-parallel-size": parallel.data})
        if parallel.expert > 1:
            server.add("--enable-expert-parallel")
        if spec.depth:
            server.add_json("--speculative-config", self._speculation(server))
            server.note("requests with min_p or logit_bias are refused while drafting is on")
        self._kv_transfer(server)
        server.add_settings(spec.settings)
        if spec.settings.get("tool_call_parser"):
            server.add("--enable-auto-tool-choice")
        if spec.platform == "cpu" and "dtype" not in spec.settings:
            server.add("--dtype", "bfloat16")
        environment = self._environment(server)
        by_ray = parallel.nodes > 1 and self._join_by_ray(server)
        for node in range(1 if by_ray else parallel.nodes):
            own = self._node_arguments(server, node) if parallel.nodes > 1 and not by_ray else []
            where = f"node {node}" if parallel.nodes > 1 else ""
            words = ("vllm", "serve", facts.source, *server.words, *own)
            server.serve(*words, node=node, where=where, answers=node == 0, **environment)

    def _join_by_ray(self, server: ServerBuilder) -> bool:
        """Adds Ray to join nodes, if the version or the user needs it. Returns whether Ray is used."""
        parallel, is_asked = server.spec.parallel, _asks_for_ray(server.spec.extra)
        can_join = at_least(server.version, WITHOUT_RAY)
        if can_join and not is_asked:
            return False
        if not is_asked:
            server.add(*RAY)
        if can_join:
            server.note("vLLM's image has no Ray since 0.19: it must be in yours")
        address, rest = f"--address={parallel.head_node}:{RAY_PORT}", f"each of nodes 1 to {parallel.nodes - 1}"
        server.plan.before = [
            LaunchStep(("ray", "start", "--head", f"--port={RAY_PORT}"), "node 0", in_container=True),
            LaunchStep(("ray", "start", "--block", address), rest, in_container=True, node=1),
        ]
        return True

    def _node_arguments(self, server: ServerBuilder, node: int) -> list[str]:
        """Returns the arguments of one of several nodes. Nodes after the first do not serve HTTP."""
        parallel, own = server.spec.parallel, CommandBuilder(self, server.version)
        own.add_all({"--nnodes": parallel.nodes, "--node-rank": node})
        own.add_all({"--master-addr": parallel.head_node, "--master-port": GROUP_PORT})
        own.add_all({"--headless": None} if node else {})
        return own.words

    def _environment(self, server: ServerBuilder) -> dict[str, str]:
        """Returns environment variables. On a CPU: cache size and cores, since vLLM would use a whole NUMA node. In
        disaggregation: address and port of the NIXL side channel."""
        spec, environment = server.spec, dict[str, str]()
        if spec.platform == "cpu":
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(_cpu_cache_gb(server))
            if cpus := spec.placement.cpus:
                environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, each)) for each in cpus)
        if spec.role:
            port = SIDE_CHANNEL_PORT + spec.placement.number * spec.parallel.data
            environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = spec.placement.address
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        return environment

    def _speculation(self, server: ServerBuilder) -> dict[str, Any]:
        spec, version = server.spec, server.version
        if spec.role == "prefill":
            server.note(BOTH_SIDES)
        method = self.method_of(spec)
        if spec.drafter and spec.drafter.container == "gguf":
            raise UsageError(f"--head {spec.head} is a GGUF file", "vLLM takes drafters as safetensors directories")
        if method == "mtp" and not at_least(version, "0.11"):
            method = "deepseek_mtp"
        repo, revision = spec.head_repo, "" if spec.head else server.facts.revision
        model, revision = (repo.repo, repo.revision) if repo else (spec.head, revision)
        named = {"model": model, "revision": revision}
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": spec.depth}
        config |= {key: value for key, value in named.items() if value}
        if not model and spec.depth > 1 and server.facts.modules == 1:
            server.note(f"one module is used {spec.depth} times: vLLM warns that acceptance may fall, which is normal")
        if table := spec.depth_table:
            if spec.parallel.data > 1:
                hint = "--dp 1, or no --depth-by-batch"
                raise UsageError("vLLM ignores a depth by batch size with data parallelism", hint)
            if at_least(version, "0.24"):
                config["num_speculative_tokens_per_batch_size"] = table
            else:
                config["disable_by_batch_size"] = next((low - 1 for low, _, deep in table if not deep), 1024)
                server.note("this version only switches drafting off by batch size")
        return config

    def _kv_transfer(self, server: ServerBuilder) -> None:
        spec = server.spec
        if spec.role and spec.kv_offload_gb:
            raise UsageError("--role and --kv-offload need two KV connectors at once", "give one of them")
        if spec.role:
            role = {"prefill": "kv_producer", "decode": "kv_consumer"}[spec.role]
            server.add_json("--kv-transfer-config", {"kv_connector": "NixlConnector", "kv_role": role})
        if spec.kv_offload_gb:
            server.add_all({"--kv-offloading-size": spec.kv_offload_gb, "--kv-offloading-backend": "native"})
            if spec.depth_drafted:
                server.note(OFFLOAD)

    def modernize(self, line: CommandLine, version: Version) -> None:
        for flag, key in ROPE.items():
            if line.find(flag) and not self.supports(version, flag):
                line.rename(flag, f"--hf-overrides.{key}")
        word = line.find(SPECULATIVE)
        if word and word.value and VARIABLE.fullmatch(word.value):
            beside = [each.flag for each in line.words if each.flag in FOLDED or each.flag.startswith(DOTTED)]
            line.warnings += [f"{flag} belongs into {word.value}, which is not known here" for flag in beside]
            return
        before = _read(word)
        config = dict(before)
        _fold_dotted(line, config)
        _fold_flags(line, config)
        _update_keys(line, config, version)
        _update_method(line, config, version)
        if config != before:
            text = _dumped(config)
            if word:
                word.flag, word.value = SPECULATIVE, text
            else:
                line.put(SPECULATIVE, text)
        elif word and word.flag != SPECULATIVE and word.value is not None:
            line.rename(word.flag, SPECULATIVE)
        _update_connector(line, version)


def _cpu_cache_gb(server: ServerBuilder) -> int:
    """Returns GiB for the KV cache on a CPU: one sequence of --max-model-len, but at least MIN_CPU_CACHE_GB."""
    length, sized = server.spec.settings.get("max_model_len"), server.facts.sized
    if sized is None or not str(length or "").isdecimal():
        return MIN_CPU_CACHE_GB
    return max(MIN_CPU_CACHE_GB, ceil(1.1 * cache_bytes(sized, Split(device=0.0), int(str(length))) / 2**30))


def _asks_for_ray(extra: Sequence[str]) -> bool:
    """Returns whether the user's arguments choose Ray, written as one word (flag=value) or as two."""
    words = [part for word in extra for part in word.split("=", 1)]
    return any(pair == RAY for pair in pairwise(words))


# For --translate: old ways to configure speculation are merged into the JSON of --speculative-config.

ROPE = {"--rope-scaling": "rope_parameters", "--rope-theta": "rope_parameters.rope_theta"}
"""Flags that ended in 0.12 -> keys of --hf-overrides, whose dotted keys are merged."""
DOTTED = f"{SPECULATIVE}."  # prefix of flags for single keys of the JSON
VARIABLE = re.compile(r"\$\{?\w+\}?")
FOLDED = {
    **SPECULATIVE_FLAGS,
    "--speculative-model-quantization": ("quantization", str),
    "--speculative-disable-by-batch-size": ("disable_by_batch_size", int),
}
"""Flag of vLLM V0 -> (key of the JSON, its type)."""
RENAMED_KEYS = {
    **{flag[2:].replace("-", "_"): key for flag, (key, _) in FOLDED.items() if flag[2:].replace("-", "_") != key},
    "tensor_parallel_size": "draft_tensor_parallel_size",
}
NUMBERS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size")
DRAFTERS = ("eagle3", "eagle", "dflash", "dspark", "medusa", "mtp")  # drafter kinds, as they occur in model names
MOVED_CONNECTORS = {"SharedStorageConnector": "ExampleConnector"}


def _read(word: ArgumentWord | None) -> dict[str, Any]:
    if word is None or not word.value:
        return {}
    quoted = re.sub(r"(?<=[:\s,\[])(\$\{?\w+\}?)(?=[\s,}\]])", r'"\1"', word.value)
    config = parse_json(word.value)
    config = parse_json(quoted) if isinstance(config, str) else config
    if not isinstance(config, dict):
        what = f"{SPECULATIVE} is not a JSON object: {word.value[:60]}"
        raise UsageError(what, """for example '{"method": "mtp"}'""")
    return config


def _dumped(config: dict[str, Any]) -> str:
    """Returns JSON text; a number that is a shell variable, such as "$K", is written without quotes."""
    text = json.dumps(config, ensure_ascii=False)
    for key in NUMBERS:
        text = re.sub(rf'("{key}": )"({VARIABLE.pattern})"', r"\1\2", text)
    return text


def _fold_dotted(line: CommandLine, config: dict[str, Any]) -> None:
    for word in [each for each in line.words if each.flag.startswith(DOTTED)]:
        line.remove(word)
        config[word.flag.removeprefix(DOTTED)] = parse_json(word.value or "")
        line.changes.append(f"{' '.join(word.text())} -> {SPECULATIVE}")


def _fold_flags(line: CommandLine, config: dict[str, Any]) -> None:
    for flag, (key, kind) in FOLDED.items():
        word = line.take(flag, flag.replace("-", "_").replace("__", "--", 1))
        if word is None or word.value is None:
            continue
        try:
            value = word.value if VARIABLE.fullmatch(word.value) else kind(word.value)
        except ValueError:
            raise UsageError(f"{flag} is {word.value!r}, which is not a number", "for example 3") from None
        if config.setdefault(key, value) != value:
            both = f"{flag} {value} and {json.dumps(config[key])} in {SPECULATIVE}"
            line.warnings.append(f"{both} say two things: choose one")
        line.changes.append(f"{flag} {word.value} -> {key} in {SPECULATIVE}")


def _update_keys(line: CommandLine, config: dict[str, Any], version: Version) -> None:
    for old, key in RENAMED_KEYS.items():
        if old in config and key not in config:
            config[key] = config.pop(old)
            line.changes.append(f'"{old}" -> "{key}"')
    if "speculative_token_tree" in config:
        del config["speculative_token_tree"]
        line.changes.append('"speculative_token_tree" removed: drafts are chains')
    if "disable_by_batch_size" in config and at_least(version, "0.24"):
        _to_depth_table(line, config)
    table, data = config.get("num_speculative_tokens_per_batch_size"), line.find("--data-parallel-size")
    if isinstance(table, dict):
        line.warnings.append("num_speculative_tokens_per_batch_size is a list [[from, to, depth], ...], not an object")
    if table and data and data.value not in (None, "1"):
        line.warnings.append("a depth by batch size is ignored with data parallelism")


def _to_depth_table(line: CommandLine, config: dict[str, Any]) -> None:
    """Replaces disable_by_batch_size, above which nothing is drafted, by a table of depths by batch size."""
    limit, depth = config.pop("disable_by_batch_size"), config.get("num_speculative_tokens", 1)
    if not isinstance(limit, int) or not isinstance(depth, int):
        line.warnings.append("the switch-off by batch size is a table now: num_speculative_tokens_per_batch_size")
        return
    table = [[1, limit, depth], [limit + 1, max(limit + 1, 1024), 0]]
    config["num_speculative_tokens_per_batch_size"] = table
    line.changes.append(f'"disable_by_batch_size": {limit} -> "num_speculative_tokens_per_batch_size": {table}')


NOT_LOOKED_AT = "whether it has any was not looked at: headstart inspect MODEL"


def _update_method(line: CommandLine, config: dict[str, Any], version: Version) -> None:
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
        line.changes.append(f'model "{model}" -> "method": "mtp", heads of the checkpoint itself; {NOT_LOOKED_AT}')
        model = ""
    if method.endswith("_mtp") and at_least(version, "0.11"):
        config["method"] = "mtp"
        line.changes.append(f'"method": "{method}" -> "mtp"')
    named = next((kind for kind in DRAFTERS if kind in model.lower()), "")
    plain = "mtp" if method.endswith("mtp") else method
    if named and plain and named != plain and {named, plain} != {"eagle", "eagle3"}:
        line.warnings.append(f'"method": "{method}" and the model "{model}" are two kinds of drafters: choose one')


def _update_connector(line: CommandLine, version: Version) -> None:
    word, known = line.find("--kv-transfer-config"), published("vllm")
    for old, new in MOVED_CONNECTORS.items():
        there = known is not None and known.has(f"kv_transfer_config.kv_connector={new}", version)
        if word and word.value and old in word.value and there:
            word.value = word.value.replace(old, new)
            line.changes.append(f"{old} -> {new}: it only shows how a connector is made; for work take NixlConnector")


LAUNCHER = Vllm()
