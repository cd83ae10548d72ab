"""Words that people bring from other programs (llama.cpp, vLLM, SGLang, Ollama, mlx-lm): what to type here instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    **dict.fromkeys(("lora", "fuse", "finetune"), "headstart trains heads, not models: headstart train --help"),
    **dict.fromkeys(("check", "test", "env", "collect-env"), "headstart doctor; headstart verify compares texts"),
    "benchmark": "headstart bench MODEL",
    "version": "headstart --version",
    "help": "headstart --help, or headstart COMMAND --help",
}
MODEL = "MODEL"
"""Stands for the argument, which has no flag."""
OPTIONS: Mapping[str, str] = {
    MODEL: "-m --model --model-path --model-id -hf -hfr --hf-repo",
    "--prompt": "-p",
    "--prompt-file": "-f --file",
    "--system": "-sys --system-prompt",
    "--raw": "-no-cnv --no-conversation --ignore-chat-template",
    "--max-tokens": "-n --n-predict --predict --num-predict --max-new-tokens --max-length --output-len",
    "--n": "-n",
    "--requests": "-n --num-prompts",
    "--threads": "-t --n-threads --num-threads",
    "--temperature": "-t --temp",
    "--repetition-penalty": "--repeat-penalty",
    "--stop": "-r --reverse-prompt --stop-sequence",
    "--max-model-len": "-c --ctx-size --num-ctx --context-length --max-seq-len --max-kv-size",
    "--context": "-c --ctx-size --max-model-len --context-length",
    "--max-num-seqs": "-np --parallel --num-parallel --max-running-requests",
    "--max-num-batched-tokens": "-b --batch-size -ub --ubatch-size --chunked-prefill-size --prefill-step-size",
    "--kv-cache-dtype": "-ctk -ctv --cache-type-k --cache-type-v --kv-bits",
    "--quantization": "-q --quantize",
    "--head": "-md --model-draft --draft-model --speculative-model --speculative-draft-model-path --spec-draft-model",
    "--depth": "--draft --draft-n --draft-max --spec-draft-n-max --num-draft-tokens --num-speculative-tokens "
    "--speculative-num-steps --speculative-num-draft-tokens",
    "--drafter": "--spec-type --speculative-algorithm --speculative-algo --spec-method",
    "--served-model-name": "-a --alias",
    "--chat-template": "--chat-template-file",
    "--tp": "--tensor-parallel-size -tp --tp-size",
}
"""Our options, and how others spell them."""
ANYWAY: Mapping[str, str] = {
    **dict.fromkeys(("--stream", "--verbose", "-v", "--color", "--jinja", "-e", "--no-display-prompt", "--mlock"),
                    "leave it out"),
    **dict.fromkeys(("-i", "-cnv", "--interactive", "--conversation"), "headstart chat MODEL is a conversation"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "-fa", "--flash-attn"),
                    "leave it out: headstart doctor shows the backend that is used"),
    "--mem-fraction-static": "--kv-blocks sizes the KV cache",
    **dict.fromkeys(("-tp", "--tp", "--tp-size", "-dp", "--dp", "--dp-size"), "headstart runs one copy of a model on "
                    "one machine: leave it out; headstart launch starts engines that run on several"),
}  # fmt: skip
"""Options that there is no other word for."""
UNEXPECTED: Mapping[str, str] = {
    "list": "headstart models lists all; headstart models remove MODEL removes one",
    **dict.fromkeys(("generate", "chat"), "for a prompt: headstart generate MODEL --prompt TEXT"),
}
"""By command, where a word more was given than it takes."""


def told(error: Any, words: Sequence[str]) -> tuple[str, str]:
    """What to say of a line that typer refused, and what to type instead; that is empty where nothing is known."""
    message, context = error.format_message(), error.ctx
    flag = getattr(error, "option_name", None)
    typed = _typed(flag, words) if flag else ""
    hint = _hint(message, typed, context.command, context.command_path, words)
    short = re.sub(r" \(Possible options: .*\)$|\. Did you mean .*\?$", "", message) if hint else message
    return short.replace(f"option: {flag}", f"option: {typed}"), hint


def _hint(message: str, flag: str, command: Any, path: str, words: Sequence[str]) -> str:
    if flag:
        return _of_root(flag) if hasattr(command, "commands") else _of_option(flag, command, path)
    if hasattr(command, "commands"):
        return COMMANDS.get(next((word for word in words if not word.startswith("-")), ""), "")
    if message.startswith("Missing") and command.epilog:
        return f"for example: {command.epilog.split(chr(10) * 2)[1]}"
    return UNEXPECTED.get(command.name, "") if "unexpected extra argument" in message else ""


def _typed(flag: str, words: Sequence[str]) -> str:
    """The whole word in which a letter was refused: -ngl is read as -n gl."""
    heads = [word.partition("=")[0] for word in words]
    joined = [head for head in heads if head[:1] == "-" and head[1:2] != "-" and flag[1] in head[1:]]
    return flag if flag in heads or not joined else joined[0]


def _of_root(flag: str) -> str:
    if flag in ("-v", "-V"):
        return "headstart --version"
    return "a command comes first: headstart generate MODEL --prompt TEXT, headstart serve MODEL"


def _of_option(flag: str, command: Any, path: str) -> str:
    own = {each for item in command.params for each in item.opts if not getattr(item, "hidden", False)}
    names = {*own, MODEL} if "model" in own else own
    flag = flag.replace("_", "-")
    if flag in own:
        return f"write {flag}"
    meant = [ours for ours, theirs in OPTIONS.items() if flag in theirs.split() and ours in names]
    if MODEL in meant:
        return f"the model has no flag: {path} MODEL"
    if meant:
        return f"write {' or '.join(meant)}"
    if flag in ("-p", "--prompt"):
        return "headstart generate MODEL --prompt TEXT"
    return ANYWAY.get(flag) or _of_vllm(flag)


def _of_vllm(flag: str) -> str:
    from headstart.cli.vllm_flags import FLAGS, hint_of
    from headstart.cli.vllm_words import vllm_name

    name = vllm_name(flag)
    return (FLAGS[name].hint or "leave it out") if name in FLAGS else hint_of(name) if name else ""
