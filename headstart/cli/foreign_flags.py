"""Commands and flags of other programs (llama.cpp, vLLM, SGLang, Ollama, mlx-lm), with what to type here instead."""

from collections.abc import Iterable, Mapping

from headstart.cli.parser import Command
from headstart.errors import did_you_mean

COMMANDS: Mapping[str, str] = {
    "run": "headstart chat MODEL, or headstart generate MODEL --prompt TEXT",
    **dict.fromkeys(("complete", "cli", "ask"), "headstart generate MODEL --prompt TEXT"),
    **dict.fromkeys(("list", "ls", "manage"), "headstart models"),
    **dict.fromkeys(("rm", "remove", "delete"), "headstart models remove MODEL"),
    **dict.fromkeys(("show", "info"), "headstart inspect MODEL"),
    **dict.fromkeys(("start", "up", "server", "api", "launch_server"), "headstart serve MODEL"),
    **dict.fromkeys(("download", "get", "fetch", "install"), "headstart pull MODEL"),
    **dict.fromkeys(("create", "cp", "push", "upload"), "models are files: headstart serve PATH"),
    **dict.fromkeys(("convert", "quantize"), "models are read as they are: headstart serve MODEL --quantization int8"),
    **dict.fromkeys(("lora", "adapter"), "headstart serve MODEL --lora NAME=PATH"),
    **dict.fromkeys(("fuse", "finetune"), "headstart trains heads, not models: headstart train --help"),
    **dict.fromkeys(("check", "test", "env", "collect-env"), "headstart doctor; headstart verify compares texts"),
    "benchmark": "headstart bench MODEL",
    "version": "headstart --version",
    "help": "headstart --help, or headstart COMMAND --help",
}
MIN_SIMILARITY = 0.75  # smallest similarity (0 to 1) of an unknown flag and a flag to suggest
MODEL = "MODEL"  # key of OPTIONS for the positional argument
FILE_IN_REPO = ("-hff", "--hf-file")  # name a file of the Hub repo that an earlier flag names
OPTIONS: Mapping[str, str] = {
    MODEL: "-m --model --model-path --model-id -hf -hfr --hf-repo",
    "--prompt": "-p",
    "--input-tokens": "-p --n-prompt --random-input-len",
    "--output-tokens": "-n --n-gen --random-output-len",
    "--prompt-file": "-f --file",
    "--lora": "--adapter --adapter-path --lora-paths --lora-adapters --lora-modules --lora-scaled",
    "--system": "-sys --system-prompt",
    "--raw": "-no-cnv --no-conversation --ignore-chat-template",
    "--max-tokens": "-n --n-predict --predict --num-predict --max-new-tokens --max-length --output-len",
    "--n": "-n",
    "--requests": "-n --num-prompts",
    "--threads": "-t --n-threads --num-threads",
    "--temperature": "-t --temp",
    "--seed": "-s",
    "--repetition-penalty": "--repeat-penalty",
    "--stop": "-r --reverse-prompt --stop-sequence",
    "--max-model-len": "-c --ctx-size --num-ctx --context-length --max-seq-len --max-kv-size",
    "--context": "-c --ctx-size --max-model-len --context-length",
    "--max-num-seqs": "-np --parallel --num-parallel --max-running-requests --max-batch-size",
    "--max-num-batched-tokens": "-b --batch-size -ub --ubatch-size --chunked-prefill-size --prefill-step-size "
    "--max-num-tokens",
    "--kv-cache-dtype": "-ctk -ctv --cache-type-k --cache-type-v --kv-bits",
    "--quantization": "-q --quantize",
    "--head": "-md --model-draft --draft-model --speculative-model --speculative-draft-model-path --speculative-draft "
    "--spec-draft-model -hfd -hfrd --spec-draft-hf --hf-repo-draft",
    "--depth": "--speculative-num-steps --draft --draft-n --draft-max --spec-draft-n-max --num-draft-tokens "
    "--num-speculative-tokens --speculative-num-draft-tokens",
    "--drafter": "--spec-type --speculative-algorithm --speculative-algo --spec-method",
    "--served-model-name": "-a --alias",
    "--chat-template": "--chat-template-file",
    "--no-web": "--no-webui --no-ui",
    "--no-enable-prefix-caching": "--disable-radix-cache --no-cache-prompt",
    "--gpu-memory-utilization": "--mem-fraction-static --gpu-memory-fraction",
    "--tp": "--tensor-parallel-size -tp --tp-size",
}
"""Our options -> spellings of other programs."""
NOT_NEEDED: Mapping[str, str] = {
    **dict.fromkeys(("--stream", "--verbose", "-v", "--color", "--jinja", "-e", "--no-display-prompt", "--mlock",
                     "-cb", "--cont-batching", "--schedule-policy"), "leave it out"),
    **dict.fromkeys(("--metrics", "--enable-metrics"), "leave it out: /metrics is always there"),
    **dict.fromkeys(("-i", "-cnv", "--interactive", "--conversation"), "headstart chat MODEL is a conversation"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "-fa", "--flash-attn", "--devices"),
                    "leave it out: headstart doctor shows the backend that is used"),
    **dict.fromkeys(("-tp", "--tp", "--tp-size", "-dp", "--dp", "--dp-size"), "headstart runs one copy of a model on "
                    "one machine: leave it out; headstart launch starts engines that run on several"),
}  # fmt: skip
"""Options without a counterpart -> what to do instead."""
EXTRA_ARGUMENT: Mapping[str, str] = {
    "models list": "headstart models lists all; headstart models remove MODEL removes one",
    **dict.fromkeys(("generate", "chat"), "for a prompt: headstart generate MODEL --prompt TEXT"),
}
"""Command -> what to do about an extra argument."""


def command_hint(word: str, commands: Iterable[str]) -> str:
    """What to type instead of an unknown first word; empty if nothing is known."""
    if word in ("-v", "-V"):
        return "headstart --version"
    if word.startswith("-"):
        return "a command comes first: headstart generate MODEL --prompt TEXT, headstart serve MODEL"
    return COMMANDS.get(word) or did_you_mean(word, commands)


def counterparts(flag: str, command: Command) -> list[str]:
    """The options of a command, or MODEL, that another program's flag stands for."""
    names = {flag for flag, item in command.flags.items() if not item.is_hidden}
    names |= {MODEL} if any(item.name == "model" for item in command.options) else set()
    return [ours for ours, theirs in OPTIONS.items() if flag in theirs.split() and ours in names]
