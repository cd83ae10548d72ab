"""Commands and flags of other programs (llama.cpp, vLLM, SGLang, Ollama, mlx-lm), with what to type here instead."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from headstart.cli.parser import Command, ParseError
from headstart.config import MAX_DEPTH
from headstart.errors import UsageError

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
OPTIONS: Mapping[str, str] = {
    MODEL: "-m --model --model-path --model-id -hf -hfr --hf-repo",
    "--prompt": "-p",
    "--prompt-file": "-f --file",
    "--lora": "--adapter --adapter-path --lora-paths --lora-adapters --lora-modules --lora-scaled",
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
    "--gpu-memory-utilization": "--mem-fraction-static --gpu-memory-fraction",
    "--tp": "--tensor-parallel-size -tp --tp-size",
}
"""Our options -> spellings of other programs."""
NOT_NEEDED: Mapping[str, str] = {
    **dict.fromkeys(("--stream", "--verbose", "-v", "--color", "--jinja", "-e", "--no-display-prompt", "--mlock"),
                    "leave it out"),
    **dict.fromkeys(("-i", "-cnv", "--interactive", "--conversation"), "headstart chat MODEL is a conversation"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "-fa", "--flash-attn", "--devices"),
                    "leave it out: headstart doctor shows the backend that is used"),
    **dict.fromkeys(("-tp", "--tp", "--tp-size", "-dp", "--dp", "--dp-size"), "headstart runs one copy of a model on "
                    "one machine: leave it out; headstart launch starts engines that run on several"),
}  # fmt: skip
"""Options without a counterpart -> what to do instead."""
VALUES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "--drafter": ((r"(?i)(?:.*,)?ngram.*", "ngram"), (r".*", "")),  # the head decides: auto
    "--max-model-len": ((r"0", ""),),
    "--max-num-seqs": ((r"-1", ""),),
    "--kv-cache-dtype": ((r"(?i)q\d.*", "int8"), (r"bf16", "bfloat16"), (r"f32", "float32"), (r"f16|auto", "")),
    "--depth": ((r"1[7-9]|[2-9]\d|\d{3,}", str(MAX_DEPTH)),),
}
"""Our options -> (pattern of another program's value, our value); empty: the default, so the option is left out."""
ENGINES = ("llamacpp", "sglang", "vllm", "trtllm", "xllm")  # programs whose whole command lines are translated
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
    near = get_close_matches(word, commands, n=1)
    return COMMANDS.get(word) or (f"did you mean headstart {near[0]}?" if near else "")


def option_hint(error: ParseError, name: str, command: Command, words: Sequence[str] = ()) -> str:
    """What to type instead of the `words` that a command refused; empty if nothing is known."""
    if not error.flag:
        return error.hint or (EXTRA_ARGUMENT.get(name, "leave them out") if error.is_extra else "")
    own = {flag for flag, item in command.flags.items() if not item.is_hidden}
    flag = error.flag.replace("_", "-")
    if flag in own:
        return f"write {flag}"
    if line := _whole_line(words, name, command):
        return line
    meant = _counterparts(flag, command)
    if MODEL in meant:
        return f"the model has no flag: headstart {name} MODEL"
    if meant:
        return f"write {' or '.join(meant)}"
    if flag in ("-p", "--prompt"):
        return "headstart generate MODEL --prompt TEXT"
    if hint := NOT_NEEDED.get(flag) or _vllm_hint(flag):
        return hint
    near = get_close_matches(flag, own, n=1, cutoff=MIN_SIMILARITY)
    return f"did you mean {near[0]}?" if near else f"leave {flag} out; headstart {name} --help-all lists all options"


def _counterparts(flag: str, command: Command) -> list[str]:
    """The options of a command, or MODEL, that another program's flag stands for."""
    names = {flag for flag, item in command.flags.items() if not item.is_hidden}
    names |= {MODEL} if any(item.name == "model" for item in command.options) else set()
    return [ours for ours, theirs in OPTIONS.items() if flag in theirs.split() and ours in names]


def _whole_line(words: Sequence[str], name: str, command: Command) -> str:
    """Another engine's command line in the options of this command, with the flags that are left out; empty unless at
    least two flags are another engine's."""
    from headstart.tools.launch.arguments import FLAG, SWITCHES, argument_table

    flags = {_spelled(word.partition("=")[0]) for word in words if FLAG.match(word)}
    tables = [table for engine in ENGINES if (table := argument_table(engine))]
    table = max(tables, key=lambda each: sum(bool(each.find(flag)) for flag in flags))
    if sum(bool(table.find(flag) or _counterparts(flag, command)) for flag in flags - command.flags.keys()) < 2:
        return ""
    rest, model, options, left_out = list(words), list[str](), list[list[str]](), list[str]()
    has_model_flag = any(MODEL in _counterparts(flag, command) for flag in flags)
    while rest:
        word = rest.pop(0)
        if not FLAG.match(word):
            model.append(word)
            continue
        written, equals, value = word.partition("=")
        flag = _spelled(written)
        found, own = table.find(flag), command.flags.get(flag)
        ours = [flag] if own and not own.is_hidden else _counterparts(flag, command)
        is_switch = own.is_switch if own else bool(found) and table.kinds.get(found[0]) in SWITCHES
        most = 0 if is_switch or equals else 1 if ours or found or has_model_flag or model else 0
        if not ours and found and table.numbers.get(found[0]) in ("*", "+"):
            most = len(rest)
        values = [value] if equals else []
        while len(values) < most and rest and not FLAG.match(rest[0]):
            values.append(rest.pop(0))
        text = _value_here(ours[0], values[0]) if ours and values else ""
        if MODEL in ours:
            model += values
        elif ours and (text or is_switch) and _fits(option := [ours[0], *([text] if text else [])], options, command):
            options.append(option)
        else:
            left_out.append(written)
    line = [*model, *(word for option in options for word in option)]
    without = f" (without {', '.join(left_out)})" if left_out else ""
    return f"write headstart {name} {shlex.join(line)}{without}"


def _spelled(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _fits(option: Sequence[str], others: Sequence[Sequence[str]], command: Command) -> bool:
    """Whether an option is honoured, has an allowed value, and is not given yet or may be repeated."""
    from headstart.cli.vllm_flags import FLAGS

    if option[0] in FLAGS or (any(option[0] == each[0] for each in others) and not command.flags[option[0]].is_list):
        return False
    try:
        command.read(command.split(option)[0])
    except UsageError:
        return False
    return True


def _value_here(ours: str, value: str) -> str:
    return next((here for pattern, here in VALUES.get(ours, ()) if re.fullmatch(pattern, value)), value)


def _vllm_hint(flag: str) -> str:
    from headstart.cli.vllm_flags import FLAGS, hint_of, vllm_name

    name = vllm_name(flag)
    return (FLAGS[name].hint or "leave it out") if name in FLAGS else hint_of(name) if name else ""
