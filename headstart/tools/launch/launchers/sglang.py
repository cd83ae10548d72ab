"""SGLang: steps and draft tokens are counted apart, the algorithm has other names, and 48 requests are the most."""

from __future__ import annotations

import json
from typing import ClassVar

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
from headstart.tools.launch.versions import Version, at_least

FIELDS = "sglang/srt/arg_groups/fields"
DEFAULT_REQUESTS = 256
"""Running requests asked for, since SGLang takes 48 when it drafts and nothing is said."""
OWN_DRAFT = ("deepseek", "glm4", "glm_moe", "bailing", "hunyuan", "hy_v", "qwen4", "mistral")
"""Beginnings of model types for which SGLang takes the target itself as draft model."""
REJECTION = ("NEXTN", "EAGLE", "EAGLE3")
"""Algorithms whose drafts SGLang can judge by rejection sampling."""
BLOCKS = ("DFLASH", "DSPARK")
"""Those that draft a block at once: the pass has its tokens and one more."""
BACKENDS = {
    "--enable-deepep-moe": ("--moe-a2a-backend", "deepep"),
    "--enable-flashinfer-mla": ("--attention-backend", "flashinfer"),
    "--enable-flashmla": ("--attention-backend", "flashmla"),
}
MOST_IN_TREE = 8
"""Tokens of a tree that SGLang itself chooses for 5 steps and 4 branches."""
SOURCES = {
    "spec.py": ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
                "--speculative-draft-model-path"),
    "parallel.py": ("--tp-size", "--dp-size", "--ep-size", "--nnodes", "--node-rank", "--dist-init-addr"),
    "serving.py": ("--host", "--port", "--api-key", "--served-model-name", "--chat-template"),
    "model.py": ("--model-path", "--context-length", "--kv-cache-dtype", "--quantization", "--trust-remote-code",
                 "--dtype", "--load-format", "--revision"),
    "memory.py": ("--enable-hierarchical-cache", "--disable-radix-cache", "--hicache-size"),
    "schedule.py": ("--mem-fraction-static", "--max-running-requests", "--chunked-prefill-size"),
    "disagg.py": ("--disaggregation-mode", "--disaggregation-bootstrap-port"),
    "observability.py": ("--enable-metrics",),
}  # fmt: skip

FLAGS = (
    *(flag for file, names in SOURCES.items() for flag in flags_of(f"{FIELDS}/{file}", *names)),
    Flag("--speculative-algorithm", f"{FIELDS}/spec.py", values=("NEXTN", "EAGLE", "EAGLE3")),
    Flag("--speculative-algorithm", f"{FIELDS}/spec.py", since="0.5.9", values=("NGRAM", "STANDALONE")),
    Flag("--speculative-algorithm", f"{FIELDS}/spec.py", since="0.5.23", values=("DFLASH", "DSPARK")),
    Flag("--speculative-adaptive", f"{FIELDS}/spec.py", since="0.5.23"),
    Flag("--speculative-adaptive-config", f"{FIELDS}/spec.py", since="0.5.23"),
    Flag("--speculative-use-rejection-sampling", f"{FIELDS}/spec.py", since="0.5.23"),
    Flag("--speculative-dspark-block-size", f"{FIELDS}/spec.py", since="0.5.23"),
    Flag("--tool-call-parser", "sglang/srt/server_args.py"),
    Flag("--reasoning-parser", "sglang/srt/server_args.py"),
    Flag("--device", f"{FIELDS}/device.py"),
    Flag("--random-seed", f"{FIELDS}/device.py"),
    Flag("--ssl-certfile", f"{FIELDS}/serving.py", since="0.5.23"),
    Flag("--ssl-keyfile", f"{FIELDS}/serving.py", since="0.5.23"),
)


class Sglang(Launcher):
    """`python -m sglang.launch_server`."""

    name, title, program = "sglang", "SGLang", "sglang"
    modules = ("sglang.launch_server",)
    serves_by_name = True
    distributions = ("sglang",)
    divided = "sglang_router"
    bootstrap = 8998
    newest = "0.5.23"
    images: ClassVar = {
        "cuda": "lmsysorg/sglang:v{version}",
        "rocm": "lmsysorg/sglang:v{version}-rocm720-mi30x",
        "cpu": "lmsysorg/sglang:v{version}-xeon",
        "npu": "",
        "xpu": "",
    }
    instead: ClassVar = {"metal": "use llamacpp, or MTPLX"}
    flags = FLAGS
    settings: ClassVar = {
        "max_model_len": "--context-length",
        "max_num_seqs": "--max-running-requests",
        "max_num_batched_tokens": "--chunked-prefill-size",
        "gpu_memory_utilization": "--mem-fraction-static",
        "seed": "--random-seed",
        "no_prefix_caching": "--disable-radix-cache",
    }
    methods: ClassVar = {
        "mtp": "NEXTN", "eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE", "dflash": "DFLASH",
        "dspark": "DSPARK",
    }  # fmt: skip
    removed: ClassVar = {
        "--enable-ep-moe": "--ep-size says it",
        "--enable-prefix-caching": "its radix cache is on anyway",
        "--n-share-experts-fusion": "SGLang decides it",
    }
    renamed: ClassVar = {
        "--cuda-graph-bs": "--cuda-graph-bs-decode",
        "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
        "--nsa-prefill-backend": "--dsa-prefill-backend",
        "--nsa-decode-backend": "--dsa-decode-backend",
    }
    switches = frozenset({"--enable-ep-moe", "--enable-prefix-caching"})

    def plan(self, facts: Facts, wanted: Wanted, version: Version) -> Plan:
        if facts.format == "gguf":
            raise UsageError(f"{facts.source} is a GGUF file, whose heads SGLang cannot draft with", "give safetensors")
        plan, arguments = Plan(), Arguments(self, version)
        parallel = wanted.parallel
        if wanted.role and wanted.platform == "cpu":
            raise UsageError("SGLang hands caches over between GPUs only", "vllm does it on a CPU too")
        self._place(facts, wanted, arguments)
        if wanted.depth:
            self._speculation(facts, wanted, arguments, plan)
        if wanted.role:
            self._divided(wanted, arguments, plan)
        if wanted.kv_offload_gb:
            arguments.add("--enable-hierarchical-cache")
            arguments.add("--hicache-size", wanted.kv_offload_gb)
            if wanted.depth_drafted:
                plan.notes.append(OFFLOAD)
        self.apply_settings(arguments, wanted.settings)
        words = ("python", "-m", "sglang.launch_server", *arguments.words)
        if parallel.nodes > 1 and parallel.data > 1:
            raise UsageError("SGLang's copies side by side do not span nodes", "--dp 1, or one server for each node")
        for rank in range(parallel.nodes):
            node = Arguments(self, version)
            if parallel.nodes > 1:
                node.add("--nnodes", parallel.nodes)
                node.add("--node-rank", rank)
                node.add("--dist-init-addr", f"{parallel.head_node}:20000")
            where, port = f"node {rank}" if parallel.nodes > 1 else "", None if rank else wanted.port
            step = Step((*words, *node.words, *wanted.extra), where, environment=wanted.visible, node=rank, port=port)
            plan.serve.append(step)
        return plan

    def _divided(self, wanted: Wanted, arguments: Arguments, plan: Plan) -> None:
        """Prefill and decode apart. The decode side goes on from hidden states that the prefill side's drafter made."""
        arguments.add("--disaggregation-mode", wanted.role)
        if wanted.role == "prefill":
            arguments.add("--disaggregation-bootstrap-port", self.bootstrap + wanted.place.number)
            if wanted.depth:
                plan.notes.append(BOTH_SIDES)

    def _place(self, facts: Facts, wanted: Wanted, arguments: Arguments) -> None:
        parallel = wanted.parallel
        arguments.add("--model-path", facts.source)
        arguments.add("--host", wanted.host)
        arguments.add("--port", wanted.port)
        arguments.add("--enable-metrics")
        if wanted.platform in ("cpu", "npu", "xpu"):
            arguments.add("--device", wanted.platform)
        arguments.add_sizes({"--tp-size": parallel.tensor, "--dp-size": parallel.data, "--ep-size": parallel.expert})

    def _speculation(self, facts: Facts, wanted: Wanted, arguments: Arguments, plan: Plan) -> None:
        algorithm, depth = self.method_of(wanted), wanted.depth
        if algorithm == "NEXTN" and facts.model_type == "deepseek_v4":
            algorithm = "EAGLE"  # the same, but checked for before names are resolved
        arguments.add("--speculative-algorithm", algorithm)
        if wanted.head:
            arguments.add("--speculative-draft-model-path", wanted.head)
        elif not facts.model_type.startswith(OWN_DRAFT):
            arguments.add("--speculative-draft-model-path", facts.source)
        if algorithm in BLOCKS:
            arguments.add("--speculative-num-draft-tokens", depth + 1)
            if algorithm == "DSPARK":
                arguments.add("--speculative-dspark-block-size", depth)
        else:
            depth = self._table(wanted, arguments, plan) if wanted.table else depth
            arguments.add("--speculative-num-steps", depth)
            arguments.add("--speculative-eagle-topk", 1)
            arguments.add("--speculative-num-draft-tokens", depth + 1)
        if "max_num_seqs" not in wanted.settings:
            arguments.add("--max-running-requests", DEFAULT_REQUESTS)
            silent = "without --max-running-requests SGLang takes 48 while drafting"
            plan.notes.append(f"{silent}; {DEFAULT_REQUESTS} asked")
        self._sampling(wanted, algorithm, arguments, plan.notes)

    def _table(self, wanted: Wanted, arguments: Arguments, plan: Plan) -> int:
        """The file of depths by batch size, and the depth to begin with, which must be one of them."""
        deepest = max(deep for _, _, deep in wanted.table)
        if not deepest:
            raise UsageError("--depth-by-batch drafts nothing in any row", "--depth 0 says that")
        steps = {str(low): {"candidate_steps": [deep]} for low, _, deep in wanted.table}
        plan.files["adaptive.json"] = json.dumps(steps, indent=1) + "\n"
        plan.facts["adaptive.steps"] = [deep for _, _, deep in wanted.table]
        arguments.add("--speculative-adaptive")
        arguments.add("--speculative-adaptive-config", "adaptive.json")
        return deepest

    def _sampling(self, wanted: Wanted, algorithm: str, arguments: Arguments, notes: list[str]) -> None:
        """Rejection sampling accepts more, where SGLang has it."""
        drafter = wanted.drafter
        if wanted.platform == "cpu":
            notes.append("on a CPU SGLang verifies by argmax: temperature is ignored while drafting")
        elif not arguments.has("--speculative-use-rejection-sampling") or algorithm not in REJECTION:
            pass
        elif drafter and (drafter.reduced_vocabulary or drafter.kind == "assistant"):
            why = "draws from a part of the vocabulary" if drafter.reduced_vocabulary else "is a Gemma 4 assistant"
            notes.append(f"the head {why}: SGLang's rejection sampling cannot be used; its default rule is exact too")
        else:
            arguments.add("--speculative-use-rejection-sampling")
            notes.append("rejection sampling accepts more than the default rule; both are exact")
        notes.append("min_p is ignored while drafting")

    def modernize(self, line: CommandLine, version: Version) -> None:
        algorithm = line.find("--speculative-algorithm", "--speculative-algo")
        if algorithm and algorithm.flag == "--speculative-algo":
            line.rename("--speculative-algo", "--speculative-algorithm")
        line.rename("--speculative-draft", "--speculative-draft-model-path")  # once the only flag that began so
        for old, new in (("MTP", "NEXTN"), ("LOOKAHEAD", "NGRAM")):
            if algorithm and (algorithm.value or "").upper() == old:
                algorithm.value = new
                line.changes.append(f"--speculative-algorithm {old} -> {new}")
        if token := line.assigned("SGLANG_ENABLE_SPEC_V2"):
            line.erase(token)
            line.changes.append("SGLANG_ENABLE_SPEC_V2 removed: there is one way to draft now")
        _backends(line)
        if line.find("--enable-ep-moe") and not line.find("--ep-size"):
            tensor = line.find("--tp-size", "--tp")
            line.put("--ep-size", tensor.value if tensor and tensor.value else "1")
        _tree(line)
        if algorithm and at_least(version, "0.5") and not line.find("--max-running-requests"):
            line.put("--max-running-requests", str(DEFAULT_REQUESTS))
            added = f"--max-running-requests {DEFAULT_REQUESTS} added"
            line.changes.append(f"{added}: 48 is the silent default with drafts")


def _backends(line: CommandLine) -> None:
    """Switches that chose a backend, which a flag with a value does now."""
    for old, (flag, value) in BACKENDS.items():
        if line.find(old) and line.take(old):
            line.put(flag, value)
            line.changes.append(f"{old} -> {flag} {value}")


def _tree(line: CommandLine) -> None:
    """Steps, width and size of a draft tree, of which SGLang wants all that do not follow."""
    steps, width = line.find("--speculative-num-steps"), line.find("--speculative-eagle-topk")
    drafts = line.find("--speculative-num-draft-tokens")
    if steps is None or not (steps.value or "").isdigit():
        return
    depth = int(str(steps.value))
    if width is None:
        line.put("--speculative-eagle-topk", "1")
        line.changes.append("--speculative-eagle-topk 1 added: --speculative-num-steps needs it")
    wide = int(str(width.value)) if width and (width.value or "").isdigit() else 1
    if wide == 1 and drafts and drafts.value != str(depth + 1):
        line.changes.append(f"--speculative-num-draft-tokens {drafts.value} -> {depth + 1}: steps + 1")
        drafts.value = str(depth + 1)
    if wide > 1 and drafts is None:
        size = min(1 + wide + (depth - 1) * wide * wide, MOST_IN_TREE)
        line.put("--speculative-num-draft-tokens", str(size))
        line.changes.append(f"--speculative-num-draft-tokens {size} added: a tree {wide} wide needs its size")


LAUNCHER = Sglang()
