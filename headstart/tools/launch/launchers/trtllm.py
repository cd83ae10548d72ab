"""TensorRT-LLM: speculation is part of a YAML file.

In 1.3 the key for its depth was renamed, and depths by batch size came to MTP and EAGLE-3; until then they were keyed
by the smallest batch, since then by the largest.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from headstart.errors import UsageError
from headstart.tools.launch.commands import CommandLine
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.launcher import Arguments, Flag, Launcher, Plan, Step, Wanted, flags_of
from headstart.tools.launch.versions import Version, at_least, text_of

SERVE = "tests/unittest/api_stability/references/trtllm_serve_cli.yaml"
ARGUMENTS = "tensorrt_llm/llmapi/llm_args.py"
BASE = "tests/unittest/api_stability/references/decoding_base_config.yaml"
RENAMED_IN = "1.3"

FLAGS = (
    *flags_of(
        SERVE, "--host", "--port", "--extra_llm_api_options", "--tp_size", "--ep_size", "--max_batch_size",
        "--max_seq_len", "--max_num_tokens", "--chat_template", "--tool_parser", "--reasoning_parser", "--revision",
        "--trust_remote_code", "--free_gpu_memory_fraction", "--gpus_per_node",
    ),
    Flag("--served_model_name", SERVE, since="1.3"),
    Flag("--kv_cache_dtype", SERVE, since="1.3"),
    Flag("config.speculative_config", ARGUMENTS),
    Flag("config.return_perf_metrics", ARGUMENTS),
    Flag("config.enable_iter_perf_stats", ARGUMENTS),
    Flag("speculative_config.decoding_type", ARGUMENTS),
    Flag("speculative_config.speculative_model", BASE),
    Flag("speculative_config.draft_len_schedule", BASE, since="1.2"),
    Flag("speculative_config.max_draft_len", BASE),
    Flag("speculative_config.num_nextn_predict_layers", ARGUMENTS, until=RENAMED_IN),
)  # fmt: skip


class TrtLlm(Launcher):
    """`trtllm-serve MODEL --extra_llm_api_options extra.yaml`, spelled as every version takes it."""

    name, title, program = "trtllm", "TensorRT-LLM", "trtllm-serve"
    distributions = ("tensorrt_llm",)
    newest = "1.2.0"
    images: ClassVar = {"cuda": "nvcr.io/nvidia/tensorrt-llm/release:{version}"}
    instead: ClassVar = {
        "rocm": "use vllm or sglang", "xpu": "use vllm", "npu": "use xllm or vllm", "metal": "use llamacpp, or MTPLX",
        "cpu": "describe NVIDIA GPUs: --gpus h200x8; or use vllm or llamacpp",
    }  # fmt: skip
    flags = FLAGS
    settings: ClassVar = {
        "max_model_len": "--max_seq_len",
        "max_num_seqs": "--max_batch_size",
        "max_num_batched_tokens": "--max_num_tokens",
        "gpu_memory_utilization": "--free_gpu_memory_fraction",
        "tool_call_parser": "--tool_parser",
    }
    joint = "_"
    copies = True
    model_first = True
    methods: ClassVar = {
        "mtp": "MTP", "eagle3": "Eagle3", "draft_model": "Draft_Target", "dflash": "DFlash", "dspark": "DSpark",
    }  # fmt: skip

    def plan(self, facts: Facts, wanted: Wanted, version: Version) -> Plan:
        if facts.format == "gguf":
            raise UsageError(f"{facts.source} is a GGUF file, which TensorRT-LLM does not read", "give safetensors")
        self.refuse(
            wanted,
            role="prefill and decode apart are set up by `trtllm-serve disaggregated` and its own config file",
            kv_offload_gb="take what --dry-run prints, and add host_cache_size under kv_cache_config in extra.yaml",
        )
        plan, arguments = Plan(), Arguments(self, version)
        parallel = wanted.parallel
        arguments.add("--host", wanted.host)
        arguments.add("--port", wanted.port)
        arguments.add("--extra_llm_api_options", "extra.yaml")
        arguments.add_sizes({"--tp_size": parallel.tensor, "--ep_size": parallel.expert})
        top: dict[str, Any] = {"return_perf_metrics": True, "enable_iter_perf_stats": True}
        if speculation := self._speculation(wanted, arguments, plan.notes):
            top["speculative_config"] = plan.facts["speculative_config"] = arguments.config(
                "speculative_config", speculation
            )
        plan.files["extra.yaml"] = yaml_of(arguments.config("config", top))
        self.apply_settings(arguments, wanted.settings)
        words: tuple[str, ...] = ("trtllm-serve", facts.source, *arguments.words, *wanted.extra)
        if parallel.nodes > 1:
            words = ("mpirun", "-n", str(parallel.tensor), "trtllm-llmapi-launch", *words)
            plan.notes.append("across nodes it runs under MPI or Slurm: give mpirun the host list")
        plan.serve = [Step(words, environment=wanted.visible, port=wanted.port)]
        return plan

    def _speculation(self, wanted: Wanted, arguments: Arguments, notes: list[str]) -> dict[str, Any]:
        depth = wanted.depth_drafted
        if not depth:
            return {}
        config: dict[str, Any] = {"decoding_type": self.method_of(wanted)}
        old = wanted.method == "mtp" and not at_least(arguments.version, RENAMED_IN)
        config["num_nextn_predict_layers" if old else "max_draft_len"] = depth
        if wanted.head:
            config["speculative_model"] = wanted.head
        if table := wanted.table:
            if not at_least(arguments.version, RENAMED_IN):
                what = f"TensorRT-LLM {text_of(arguments.version)} drafts to one depth with heads"
                raise UsageError(what, "leave --depth-by-batch out")
            config["draft_len_schedule"] = _schedule(table)
            config["max_draft_len"] = table[0][2]
        notes.append("logprobs and penalties are refused while drafting; pipeline parallelism does not go with it")
        return config

    def modernize(self, line: CommandLine, version: Version) -> None:
        """Keys of the YAML file may stand in the text too, as people paste them."""
        new = at_least(version, RENAMED_IN)
        old_key, key = "max_draft_len", "num_nextn_predict_layers"
        if new:
            old_key, key = key, old_key
        for word in line.words:
            text = word.value or ""
            if old_key in text and (new or "MTP" in text):  # other drafters have had max_draft_len all along
                word.value = text.replace(old_key, key)
                line.changes.append(f"{old_key} -> {key}")
            for stale in ("use_sa_spec", "sa_spec_threshold"):
                if stale in text:
                    line.warnings.append(f"{stale} is now part of sa_config")
            if word.flag in (f"--{old_key}", f"--{key}"):
                line.warnings.append(f"{word.flag} is a key of speculative_config in the YAML file, not a flag")


def _schedule(table: list[list[int]]) -> dict[int, int]:
    """Largest batch size -> depth; above the last nothing is drafted. Raises UsageError for what it refuses."""
    depths = [depth for _, _, depth in table]
    if not depths[0] or max(depths) > depths[0]:
        what = f"--depth-by-batch drafts {depths[0]} tokens for the smallest batches, but TensorRT-LLM wants most there"
        raise UsageError(what, "for example [[1, 4, 3], [5, 64, 0]]")
    ends = [low - 1 for low, _, _ in table[1:]] + [table[-1][1]]
    return dict(zip(ends, depths, strict=True))


def yaml_of(document: dict[Any, Any], indent: int = 0) -> str:
    """Nested dictionaries of plain values as YAML; text in JSON's quotes, which YAML reads."""
    lines = ""
    for key, value in document.items():
        if isinstance(value, dict):
            lines += f"{' ' * indent}{key}:\n{yaml_of(value, indent + 2)}"
        else:
            lines += f"{' ' * indent}{key}: {json.dumps(value)}\n"
    return lines


LAUNCHER = TrtLlm()
