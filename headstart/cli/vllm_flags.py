"""vLLM's spellings that `serve` takes beside its own: each is honoured, or refused with what to do instead."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from headstart.cli.help import MORE
from headstart.cli.options import OptionGroup, parameter
from headstart.cli.vllm_words import OTHER
from headstart.config import MAX_DEPTH, EngineConfig
from headstart.errors import UsageError

ONE = "headstart runs one copy of a model on one machine; for more, run vLLM or SGLang"


@dataclass(frozen=True)
class Flag:
    """`hint` None: it asks for what happens anyway. `allowed`: values that do so; switches have none."""

    help: str
    hint: str | None = None
    takes_value: bool = False
    allowed: tuple[str | bool, ...] = ()


FLAGS: Mapping[str, Flag] = {
    "--enable-prefix-caching": Flag("On anyway."),
    "--enable-chunked-prefill": Flag("On anyway."),
    "--enable-auto-tool-choice": Flag("On anyway."),
    "--disable-log-requests": Flag("So it is anyway."),
    "--no-enable-log-requests": Flag("So it is anyway."),
    "--enable-log-requests": Flag("Refused: prompts are never logged.", "leave it out"),
    "--no-enable-chunked-prefill": Flag(
        "Refused: prompts go in chunks.", "--max-num-batched-tokens sets the size of the chunks"
    ),
    "--enforce-eager": Flag("Refused: nothing is compiled or captured.", "leave it out"),
    "--trust-remote-code": Flag("Refused: no code is run from checkpoints.", "leave it out"),
    "--gpu-memory-utilization": Flag("Refused.", "--kv-blocks sizes the KV cache", True),
    "--swap-space": Flag("Refused: preempted sequences are computed again.", "leave it out", True),
    "--tensor-parallel-size": Flag("1.", ONE, True, ("1",)),
    "--pipeline-parallel-size": Flag("1.", ONE, True, ("1",)),
    "--data-parallel-size": Flag("1.", ONE, True, ("1",)),
    "--speculative-disable-by-batch-size": Flag("No drafts while more sequences run.", takes_value=True),
    "--load-format": Flag("auto.", "safetensors and GGUF are recognized: leave it out", True, ("auto",)),
    "--tokenizer": Flag("Refused.", "the checkpoint's own tokenizer is used: leave it out", True),
    "--revision": Flag("Refused.", "write MODEL@REVISION", True),
}


SAME: Mapping[str, tuple[str | bool, ...]] = {
    "--tokenizer-mode": ("auto", "hf"), "--config-format": ("auto", "hf"), "--runner": ("auto", "generate"),
    "--convert": ("auto", "none"), "--task": ("auto", "generate"), "--scheduling-policy": ("fcfs",),
    "--disable-log-stats": (True,), "--nnodes": ("1",), "--node-rank": ("0",), "--api-server-count": ("1",),
    "--generation-config": ("auto",), "--safetensors-load-strategy": ("lazy",), "--enable-reasoning": (True,),
    "--chat-template-content-format": ("auto",), "--no-enable-log-outputs": (True,), "--disable-access-log": (True,),
    "--disable-uvicorn-access-log": (True,), "--use-v2-block-manager": (True,),
    "--no-enable-lora": (True,), "--no-enforce-eager": (True,), "--no-trust-remote-code": (True,),
    "--no-async-scheduling": (True,), "--async-scheduling": (True,), "--allow-credentials": (True,),
    "--no-enable-expert-parallel": (True,), "--logprobs-mode": ("raw_logprobs",),
    "--no-enable-sleep-mode": (True,),
}  # fmt: skip
"""Other flags of vLLM's, with values that ask for what happens anyway."""
GROUPS: tuple[tuple[str, str], ...] = (
    (r"lora", "adapters are not served: merge the adapter into the checkpoint"),
    (r"mm-|media|image|video|audio|vision|multimodal|language-model-only", "headstart serves text only: leave it out"),
    (r"parallel|nnodes|node-rank|master-|expert|eplb|all2all|distributed|numa|dcp|pcp|worker|ray|headless|ep-", ONE),
    (r"cuda-?graph|compilation|optimization|enforce-eager|kernel|backend|fuse|performance|jit|autotune",
     "nothing is compiled or captured: leave it out"),
    (r"kv-|offload|swap|mamba|cache|transfer|hybrid", "--kv-blocks sizes the KV cache, which is one: leave it out"),
    (r"speculative|spec-|ngram", "--speculative-config takes method, model and num_speculative_tokens"),
    (r"structured|guided|reasoning-config", "grammars and schemas work without a setting: leave it out"),
    (r"ssl-|uds|grpc|root-path|middleware|h11|uvicorn", "put a proxy in front of it, such as nginx"),
    (r"pool|embed|convert|runner", "headstart generates text only: leave it out"),
    (r"log(?!p)|trace|otlp|profil|metric|stats|observ", "/metrics and --access-log are what there is: leave it out"),
    (r"tool|chat|template|response-role", "--tool-call-parser and --chat-template are what there is: leave it out"),
    (r"schedul|prefill|batch|stream|async|queue", "--max-num-seqs and --max-num-batched-tokens size passes"),
    (r"memory|device", "--kv-blocks and --threads are what there is: leave it out"),
    (r"load|download|safetensors|hf-|tokenizer|config|model|revision|quantization|dtype|rope",
     "the checkpoint's own files decide it: leave it out"),
)  # fmt: skip
"""Words in the names of vLLM's other flags -> what to do instead; the first that fits."""
ELSE = "headstart has nothing like it: leave it out, or serve with --engine vllm"


def hint_of(flag: str) -> str:
    """What to do instead of a flag of vLLM's that is no option here."""
    from headstart.tools.launch.launchers.vllm import REMOVED

    gone = REMOVED.get(flag)
    return (
        f"{gone}: leave it out"
        if gone
        else next((hint for word, hint in GROUPS if re.search(f"(?<![a-z])(?:{word})", flag)), ELSE)
    )


def count_of(flag: str, value: str | bool) -> int:
    """Raises UsageError for a value that is no number above 0."""
    if not str(value).isdigit() or int(value) < 1:
        raise UsageError(f"{flag} is {value}, but must be a number above 0")
    return int(value)


def _name(flag: str) -> str:
    return "vllm_" + flag.removeprefix("--").replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class VllmFlags(OptionGroup):
    """The flags of `FLAGS` that were given, with their values (True: a switch)."""

    panel = f"{MORE}vLLM's spellings"
    given: Mapping[str, str | bool] = field(default_factory=dict)

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        kinds: dict[bool, tuple[Any, Any]] = {True: (str | None, None), False: (bool, False)}
        return [
            parameter(_name(flag), *kinds[entry.takes_value], flag, panel=cls.panel, help=entry.help)
            for flag, entry in FLAGS.items()
        ] + [parameter("vllm_others", list[str] | None, None, OTHER, panel=cls.panel, hidden=True)]

    @classmethod
    def collect(cls, values: Mapping[str, Any]) -> Self:
        given = {flag: values[_name(flag)] for flag in FLAGS if values[_name(flag)] not in (None, False)}
        for word in values["vllm_others"] or ():
            flag, equals, value = word.partition("=")
            given[flag] = value if equals else True
        return cls(given=given)

    def apply(self, config: EngineConfig) -> EngineConfig:
        """The engine's settings with those of vLLM's flags. Raises UsageError for what cannot be honoured."""
        self.check()
        text = self.given.get("--speculative-disable-by-batch-size")
        if text is None:
            return config
        most = count_of("--speculative-disable-by-batch-size", text)
        if config.depth_by_batch is not None:
            raise UsageError("--speculative-disable-by-batch-size and a table by batch size are both given", "give one")
        rows = [[1, most, MAX_DEPTH], [most + 1, most + 1, 0]]
        return replace(config, depth_by_batch=json.dumps(rows))

    def check(self) -> None:
        """Raises UsageError for what cannot be honoured."""
        for flag, value in self.given.items():
            entry = FLAGS.get(flag) or Flag("", hint_of(flag), True, SAME.get(flag, ()))
            if entry.hint and value not in entry.allowed:
                shown = flag if value is True else f"{flag} {value}"
                raise UsageError(f"{shown} cannot be honoured", entry.hint)
