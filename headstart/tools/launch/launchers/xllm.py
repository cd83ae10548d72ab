"""xLLM: the head is a checkpoint of its own, exported first, and each device is a process of its own."""

from __future__ import annotations

from typing import ClassVar

from headstart.errors import UsageError
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.launcher import VISIBLE, Arguments, Flag, Launcher, Plan, Step, Wanted, flags_of
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
    images: ClassVar = {
        "npu": "quay.io/jd_xllm/xllm-ai:xllm-dev-a2-arm-cann9-20260605",
        "cuda": "quay.io/jd_xllm/xllm-ai:xllm-dev-cuda-x86",
    }
    instead: ClassVar = {
        "rocm": "use vllm or sglang", "xpu": "use vllm", "metal": "use llamacpp, or MTPLX",
        "cpu": "describe accelerators, as in --gpus ascend-910bx8 or h200x8; or use vllm or llamacpp",
    }  # fmt: skip
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
        if wanted.kv_offload_gb:
            raise UsageError("xLLM sizes its host cache by blocks, not GB", "give -- --host_blocks_factor 2")
        plan, arguments = Plan(), Arguments(self, version)
        model = facts.source
        if not facts.local:  # it takes directories only
            model = f"./{facts.source.partition('@')[0].rpartition('/')[2]}"
            plan.before.append(Step(("hf", "download", facts.source, "--local-dir", model), "once"))
        arguments.add("--model", model)
        arguments.add("--host", wanted.host)
        if wanted.depth_drafted:
            self._speculation(model, wanted, arguments, plan)
        arguments.add_sizes({"--dp_size": wanted.parallel.data})
        if wanted.role:
            arguments.add("--enable_disagg_pd")
            arguments.add("--instance_role", wanted.role.upper())
        self.apply_settings(arguments, wanted.settings)
        plan.serve = [
            self._rank(rank, arguments, wanted) for rank in range(wanted.parallel.tensor * wanted.parallel.data)
        ]
        return plan

    def _rank(self, rank: int, arguments: Arguments, wanted: Wanted) -> Step:
        """The process of one device: xLLM takes the visible device of its number within the node."""
        parallel, node = wanted.parallel, Arguments(self, arguments.version)
        ranks = parallel.tensor * parallel.data
        here = -(-ranks // parallel.nodes)
        node.add("--port", wanted.port + rank)
        if ranks > 1:
            node.add("--master_node_addr", f"{parallel.head_node if parallel.nodes > 1 else '127.0.0.1'}:29500")
            node.add("--nnodes", ranks)
            node.add("--node_rank", rank)
        place = f"device {rank % here}" if ranks > 1 else ""
        place = f"node {rank // here}, {place}" if parallel.nodes > 1 else place
        visible = {VISIBLE[wanted.platform]: ",".join(map(str, range(here)))}
        words = (self.program, *arguments.words, *node.words, *wanted.extra)
        return Step(words, place, environment=visible, node=rank // here, port=None if rank else wanted.port)

    def _speculation(self, model: str, wanted: Wanted, arguments: Arguments, plan: Plan) -> None:
        algorithm, head = self.method_of(wanted), wanted.head
        if head is None:
            head = f"{model.rstrip('/')}-mtp"
            plan.before.append(Step(("headstart", "export", model, "--to", "xllm", "--out", head), "once"))
        arguments.add("--draft_model", head)
        arguments.add("--num_speculative_tokens", wanted.depth)
        arguments.add("--speculative_algorithm", algorithm)
        if wanted.table:
            arguments.add("--enable_adaptive_speculative_decode")
            plan.notes.append("xLLM sizes drafts by its own measurements: the table is replaced by that")
        inexact = "sampling while drafting is not exact in xLLM"
        plan.notes.append(f"{inexact}: it keeps the probability of the drafted token only")


LAUNCHER = Xllm()
