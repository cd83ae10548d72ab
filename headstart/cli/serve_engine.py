"""`headstart serve --engine NAME`: translates options of serve to those of another engine, or refuses them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from headstart.cli.options import EngineOptions
from headstart.cli.vllm_flags import SIZED, plain_size
from headstart.config import AUTO, depth_rows, read_count
from headstart.errors import UsageError
from headstart.options import OptionGroup, option
from headstart.wording import LEAVE_OUT, flag_of

if TYPE_CHECKING:
    from headstart.tools.launch.prepare import LaunchOptions

SETTINGS = ("served_model_name", "api_key", "ssl_certfile", "ssl_keyfile", "chat_template", "tool_call_parser",
            "reasoning_parser")  # fmt: skip
"""Server options with the same name in launchers."""
ENGINE_SETTINGS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "seed", "block_size")
"""Engine options with the same name in launchers."""
VLLM_SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill")
"""Engine options that a --no- flag of vLLM switches off."""
ADDRESS = ("host", "port")
DRAFTERS: Mapping[str, dict[str, int]] = {"auto": {}, "mtp": {}, "none": {"depth": 0}}
"""`--drafter` -> fields of LaunchOptions."""
HEAD_KINDS = ("eagle", "eagle3", "dflash", "dspark", "medusa", "mlp_speculator", "draft_model")
"""Drafters that other engines infer from --head."""
PARALLELISM = {"--tensor-parallel-size": "tp", "--data-parallel-size": "dp"}
DEFAULT_FLAGS = ("--enable-prefix-caching", "--enable-chunked-prefill", "--disable-log-requests",
                 "--no-enable-log-requests", "--enable-auto-tool-choice")  # fmt: skip
"""Flags that engines or their launchers set by default."""


@dataclass(frozen=True, kw_only=True)
class OtherEngineOptions(OptionGroup):
    """Another engine to launch."""

    panel = "Another engine"
    engine_name: str | None = option("Launch this engine (vllm, sglang, ...) with these options.", "--engine")
    dry_run: bool = option("With --engine: only print its command.", default=False)

    def check(self) -> None:
        """Raise UsageError for --dry-run without --engine."""
        if self.dry_run and self.engine_name is None:
            raise UsageError("--dry-run has no meaning without --engine", LEAVE_OUT)


def launch_options(
    engine_name: str, model: str | None, serving: OptionGroup, engine: EngineOptions, vllm: Mapping[str, str | bool]
) -> "LaunchOptions":
    """Options of the launcher. Raises UsageError for an option without a counterpart in the other engine."""
    from headstart.tools.launch.prepare import LaunchOptions

    chosen: dict[str, Any] = {name: getattr(serving, name) for name in ADDRESS}
    settings = _server_settings(serving)
    for name in sorted(engine.given):
        value = getattr(engine.config, name)
        if name in ENGINE_SETTINGS:
            settings[name] = value
        elif name in ("head", "depth_by_batch") or (name == "depth" and value != AUTO):
            chosen[name] = value
        elif name == "drafter" and value in DRAFTERS:
            chosen |= DRAFTERS[value]
        elif name == "drafter" and not (value in HEAD_KINDS and engine.config.head):
            hint = "with --engine " + LEAVE_OUT + ": MTP heads draft there"
            raise UsageError(f"--drafter {value} is headstart's own", hint)
        elif name in VLLM_SWITCHES:
            vllm = {**vllm, f"--no-{flag_of(name)[2:]}": True}
        elif name == "gpu_memory_utilization":
            vllm = {**vllm, flag_of(name): str(value)}
        elif name not in ("depth", "drafter"):
            raise UsageError(f"{flag_of(name)} has no counterpart in {engine_name}", LEAVE_OUT)
    _add_vllm_flags(engine_name, vllm, chosen, settings)
    return LaunchOptions(engine=engine_name, model=model, settings=settings, **chosen)


def _server_settings(serving: OptionGroup) -> dict[str, Any]:
    """Server options that were changed. Raises UsageError for options of headstart's own server."""
    settings: dict[str, Any] = {}
    for item in fields(serving):  # type: ignore[arg-type]
        value = getattr(serving, item.name)
        if value == item.default or item.name in ADDRESS:
            continue
        if item.name not in SETTINGS:
            what = f"{flag_of(item.name)} is an option of headstart's own server"
            raise UsageError(what, LEAVE_OUT + " with --engine")
        settings[item.name] = [str(each) for each in value] if isinstance(value, list) else str(value)
    return settings


def _add_vllm_flags(
    engine_name: str, given: Mapping[str, str | bool], chosen: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Add vLLM flags to `chosen` and `settings`; vLLM itself gets flags unknown to its launcher unchanged."""
    from headstart.tools.launch.prepare import launcher_of

    launcher = launcher_of(engine_name)
    for flag, value in given.items():
        name = flag.removeprefix("--").replace("-", "_")
        if flag in PARALLELISM:
            chosen[PARALLELISM[flag]] = read_count(flag, value)
        elif flag == "--speculative-disable-by-batch-size":
            chosen["depth_by_batch"] = json.dumps(depth_rows(flag, value))
        elif flag == "--no-enable-prefix-caching" and launcher.name != "vllm":
            settings["no_prefix_caching"] = True
        elif launcher.name == "vllm" and launcher.flag_of(name) is None:
            chosen["extra"] = (*chosen.get("extra", ()), flag, *([] if value is True else [str(value)]))
        elif flag in SIZED and str(value) in ("auto", "-1"):
            continue
        elif flag not in DEFAULT_FLAGS:
            settings[name] = plain_size(str(value)) if flag in SIZED else value
