"""xLLM: the head is a checkpoint of its own, exported first, and each device is a process of its own."""

from __future__ import annotations

from typing import ClassVar

from headstart.errors import UsageError
from headstart.tools.launch.commands import CommandLine
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.launcher import Arguments, Flag, Launcher, Plan, Step, Wanted, flags_of
from headstart.tools.launch.versions import Version

FOLDER = "xllm/core/framework/config"
SOURCES = {
    "model_config.cpp": ("--model", "--tool_call_parser", "--reasoning_parser"),
    "speculative_config.cpp": ("--draft_model", "--num_speculative_tokens", "--enable_adaptive_speculative_decode"),
    "service_config.cpp": ("--host", "--port"),
    "distributed_config.cpp": ("--master_node_addr", "--nnodes", "--node_rank"),
    "parallel_config.cpp": ("--dp_size", "--ep_size"),
    "scheduler_config.cpp": ("--max_seqs_per_batch", "--max_tokens_per_batch"),
    "kv_cache_config.cpp": ("--max_memory_utilization", "--kv_cache_dtype", "--block_size"),
    "disagg_pd_config.cpp": ("--enable_disagg_pd", "--instance_role"),
    "kv_cache_store_config.cpp": ("--host_blocks_factor",),
}
FLAGS = (
    *(flag for file, names in SOURCES.items() for flag in flags_of(f"{FOLDER}/{file}", *names)),
    Flag("--speculative_algorithm", f"{FOLDER}/speculative_config.cpp", values=("MTP", "Eagle3", "DFlash", "DSpark")),
)


class Xllm(Launcher):
    """The `xllm` server."""

    name, title, program = "xllm", "xLLM", "xllm"
    newest = "0.11.0"
    image = "quay.io/jd_xllm/xllm-ai:{version}"
    device = "--privileged"
    flags = FLAGS
    settings: ClassVar = {
        "max_num_seqs": "--max_seqs_per_batch",
        "max_num_batched_tokens": "--max_tokens_per_batch",
        "gpu_memory_utilization": "--max_memory_utilization",
    }
    joint = "_"
    methods: ClassVar = {"mtp": "MTP", "eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"}
    removed: ClassVar = {
        "--devices": "set CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES or the like",
        "--draft_devices": "the draft runs on the target's devices; choose those by CUDA_VISIBLE_DEVICES or the like",
    }

    def plan(self, facts: Facts, wanted: Wanted, version: Version) -> Plan:
        if facts.format == "gguf":
            raise UsageError(f"{facts.source} is a GGUF file, which xLLM does not read", "give safetensors")
        if not wanted.parallel.gpus:
            raise UsageError("xLLM needs accelerators, and none were found", "describe them: --gpus h200x8")
        plan, arguments = Plan(), Arguments(self, version)
        parallel = wanted.parallel
        arguments.add("--model", facts.source)
        arguments.add("--host", wanted.host)
        if wanted.depth_drafted:
            self._speculation(facts, wanted, arguments, plan)
        ranks = parallel.tensor * parallel.data
        arguments.add_sizes({"--dp_size": parallel.data, "--ep_size": parallel.expert})
        if wanted.role:
            arguments.add("--enable_disagg_pd", "true")
            arguments.add("--instance_role", wanted.role.upper())
        if wanted.kv_offload_gb:
            raise UsageError("xLLM sizes its host cache by blocks, not GB", "give -- --host_blocks_factor 2")
        self.apply_settings(arguments, wanted.settings)
        for rank in range(ranks):
            node = Arguments(self, version)
            node.add("--port", wanted.port + rank)
            if ranks > 1:
                node.add("--master_node_addr", f"{parallel.head_node if parallel.nodes > 1 else '127.0.0.1'}:29500")
                node.add("--nnodes", ranks)
                node.add("--node_rank", rank)
            place = f"device {rank}" if ranks > 1 else ""
            plan.serve.append(Step(("xllm", *arguments.words, *node.words, *wanted.extra), place))
        return plan

    def _speculation(self, facts: Facts, wanted: Wanted, arguments: Arguments, plan: Plan) -> None:
        algorithm, head = self.method_of(wanted), wanted.head
        if head is None:
            head = f"{facts.source.rstrip('/')}-mtp"
            export = ("python", "tools/export_mtp.py", "--input-dir", facts.source, "--output-dir", head)
            plan.before.append(Step(export, "once, in xLLM's repository"))
        arguments.add("--draft_model", head)
        arguments.add("--num_speculative_tokens", wanted.depth)
        arguments.add("--speculative_algorithm", algorithm)
        if wanted.table:
            arguments.add("--enable_adaptive_speculative_decode", "true")
            plan.notes.append("xLLM sizes drafts by its own measurements: the table is replaced by that")
        inexact = "sampling while drafting is not exact in xLLM"
        plan.notes.append(f"{inexact}: it keeps the probability of the drafted token only")

    def modernize(self, line: CommandLine, version: Version) -> None:
        for word in line.words:
            if word.flag.startswith("-"):
                word.flag = "--" + word.flag.lstrip("-").replace("-", "_")


LAUNCHER = Xllm()
