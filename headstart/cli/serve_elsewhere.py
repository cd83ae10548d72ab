"""`headstart serve --engine vllm`: serve's own options as another engine's; what has no counterpart is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from headstart.cli.options import EngineOptions, OptionGroup, option
from headstart.cli.vllm_flags import count_of
from headstart.cli.vllm_words import SIZED, plain_size
from headstart.config import AUTO, flag_of
from headstart.errors import UsageError

if TYPE_CHECKING:
    from headstart.tools.launch.run import LaunchOptions

SETTINGS = ("served_model_name", "api_key", "ssl_certfile", "ssl_keyfile", "chat_template", "tool_call_parser",
            "reasoning_parser")  # fmt: skip
"""Options of the server that launchers know by the same name."""
ENGINE_SETTINGS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "seed", "block_size")
"""Those of the engine."""
OWN = ("host", "port")
METHODS: Mapping[str, dict[str, int]] = {"auto": {}, "mtp": {}, "none": {"depth": 0}}
"""`--drafter` -> what it means elsewhere; other drafters are not there."""
TOLD = ("eagle", "eagle3", "dflash", "dspark", "medusa", "mlp_speculator", "draft_model")
"""Kinds that a `--head` itself tells."""


@dataclass(frozen=True, kw_only=True)
class OtherEngine(OptionGroup):
    """Serve with another engine, launched and checked."""

    panel = "Another engine"
    engine_name: str | None = option("vllm, sglang, ...: launch it with these options.", "--engine")
    dry_run: bool = option("With --engine: print its command only.", default=False)

    def check(self) -> None:
        """Raises UsageError for --dry-run alone."""
        if self.dry_run and self.engine_name is None:
            raise UsageError("--dry-run has no meaning without --engine", "leave it out")


def launch_options(
    engine_name: str,
    model: str | None,
    serving: OptionGroup,
    engine: EngineOptions,
    vllm: Mapping[str, str | bool],
) -> LaunchOptions:
    """Raises UsageError, naming the option, for one that means nothing to another engine."""
    from headstart.tools.launch.run import LaunchOptions

    chosen: dict[str, Any] = {}
    settings = _serving(serving)
    for name in sorted(engine.given):
        value = getattr(engine.config, name)
        if name in ENGINE_SETTINGS:
            settings[name] = value
        elif name in ("head", "depth_by_batch") or (name == "depth" and value != AUTO):
            chosen[name] = value
        elif name == "drafter" and value in METHODS:
            chosen |= METHODS[value]
        elif name == "drafter" and value in TOLD and engine.config.head:
            pass
        elif name == "drafter":
            hint = "with --engine leave it out: MTP heads draft there"
            raise UsageError(f"--drafter {value} is headstart's own", hint)
        elif name == "enable_prefix_caching":
            vllm = {**vllm, "--no-enable-prefix-caching": True}
        elif name != "depth":
            raise UsageError(f"{flag_of(name)} has no counterpart in {engine_name}", "leave it out")
    _vllm(engine_name, vllm, chosen, settings)
    for name in OWN:
        chosen[name] = getattr(serving, name)
    return LaunchOptions(engine=engine_name, model=model, settings=settings, **chosen)


def _serving(serving: OptionGroup) -> dict[str, Any]:
    """Raises UsageError for a changed option that only headstart's server has."""
    settings: dict[str, Any] = {}
    for item in fields(serving):  # type: ignore[arg-type]
        value = getattr(serving, item.name)
        if value == item.default or item.name in OWN:
            continue
        if item.name not in SETTINGS:
            flag = f"--{item.name.replace('_', '-')}"
            raise UsageError(f"{flag} is an option of headstart's own server", "leave it out with --engine")
        settings[item.name] = [str(each) for each in value] if isinstance(value, list) else str(value)
    return settings


PARALLEL = {"--tensor-parallel-size": "tp", "--data-parallel-size": "dp"}
ALWAYS = (
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--disable-log-requests",
    "--no-enable-log-requests",
    "--enable-auto-tool-choice",
)
"""What those engines do anyway, or their launchers see to."""


def _vllm(engine_name: str, given: Mapping[str, str | bool], chosen: dict[str, Any], settings: dict[str, Any]) -> None:
    """vLLM's flags as the engine's settings; those that its launcher does not know go to vLLM itself as they are."""
    from headstart.tools.launch.run import launcher_of

    launcher = launcher_of(engine_name)
    for flag, value in given.items():
        name = flag.removeprefix("--").replace("-", "_")
        if flag in PARALLEL:
            chosen[PARALLEL[flag]] = count_of(flag, value)
        elif flag == "--speculative-disable-by-batch-size":
            most = count_of(flag, value)
            chosen["depth_by_batch"] = f"[[1, {value}, 16], [{most + 1}, {most + 1024}, 0]]"
        elif flag == "--no-enable-prefix-caching" and launcher.name != "vllm":
            settings["no_prefix_caching"] = True
        elif launcher.name == "vllm" and launcher.flag_of(name) is None:
            chosen["extra"] = (*chosen.get("extra", ()), flag, *([] if value is True else [str(value)]))
        elif flag in SIZED and str(value) in ("auto", "-1"):
            continue
        elif flag not in ALWAYS:
            settings[name] = plain_size(str(value)) if flag in SIZED else value
