"""`ServerOptions`: the declaration of a server's options, for `headstart serve` and `ServerConfig`.

Imports nothing heavy, since every start of the command line reads it.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import ParameterError, UsageError
from headstart.options import OptionGroup, option
from headstart.server import limits

CHAT_TEMPLATE_HELP = "Chat template: chatml, gemma, llama3, vicuna, or a Jinja file."
DEFAULT_KEEP_ALIVE_S = 300.0
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")  # one part of a time such as 1h30m
_DOMAIN = re.compile(r"[\w-]+(\.[\w-]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,\"]+")
RARE: dict[str, Any] = {"panel": "Server, more", "is_rare": True}  # options that only --help-all shows


@dataclass(frozen=True, kw_only=True)
class ServerOptions(OptionGroup):
    """Options of `serve` for one server."""

    host: str = option("Address to listen on.", default="127.0.0.1")
    port: int = option("Port; 0 chooses a free one.", default=8000, min=0, max=65535)
    served_model_name: list[str] | None = option("Name of the model in requests; may be repeated.")
    max_queue: int = option("Maximum number of waiting sequences; further requests get status 503.", default=256, min=0)
    request_timeout: float | None = option("Maximum seconds of a request. Default: no limit.", above=0)
    shutdown_timeout: int = option("Seconds for running requests to finish after SIGTERM.", default=30, min=0)
    api_key: list[str] | None = option("Bearer token of requests; may be repeated. Or $HEADSTART_API_KEY.")
    api_key_file: Path | None = option("TOML file of keys with their quotas (docs/server.md).")
    allowed_origins: list[str] | None = option("Origin of web pages with access (CORS), or *; may be repeated.")
    parse_special_tokens: bool = option(
        "Parse names of special tokens in messages as special tokens.", default=False, **RARE
    )
    allow_lora_updates: bool = option(
        "Let clients load adapters from this machine's disk: /v1/load_lora_adapter.", default=False, **RARE
    )
    allow_image_urls: bool = option(
        "Download images of http and https URLs, from public addresses.", default=False, **RARE
    )
    allowed_media_domains: list[str] | None = option(
        "Domain of such URLs; only these are allowed then. May be repeated.", metavar="DOMAIN", **RARE
    )
    ssl_certfile: Path | None = option("TLS certificate (PEM).")
    ssl_keyfile: Path | None = option("TLS key (PEM).")
    chat_template: str | None = option(CHAT_TEMPLATE_HELP, metavar="NAME|FILE")
    tool_call_parser: str | None = option("Format of tool calls. Default: by the chat template.")
    reasoning_parser: str | None = option("Format of reasoning. Default: by the chat template.")
    price_per_hour: float | None = option("Dollars for this machine; adds the cost to /metrics.", min=0)
    log_format: str = option("text or json.", default="text", choices=("text", "json"), **RARE)
    access_log: bool = option("Log a line per request: id, path, status, seconds.", default=False)
    no_web: bool = option("Do not serve the web pages / and /dashboard.", default=False)
    role: str | None = option(
        "prefill: compute prompts for decode servers; decode: take prompts computed by --prefill.",
        choices=("prefill", "decode"),
        **RARE,
    )
    prefill: str | None = option("URL of the prefill server of this server.", metavar="URL", **RARE)
    record: Path | None = option(
        "Folder that records token ids of prompts and answers for headstart adapt.", is_output=True
    )
    record_limit: int = option(
        "Maximum megabytes of records; the oldest are removed first.", default=256, min=1, **RARE
    )


def check_origins(given: Iterable[str] | None) -> None:
    """Raises UsageError for a value of --allowed-origins that no browser sends."""
    for origin in given or ():
        if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
            hint = "write https://page.example, without a path or a final /, or *; repeat the option for more"
            raise UsageError(f"--allowed-origins is {origin!r}, which is no origin", hint)


def media_domains(given: Iterable[str] | None) -> tuple[str, ...]:
    """The values of --allowed-media-domains in lower case. Raises UsageError for one that is no domain."""
    names = tuple(each.strip().lower().rstrip(".") for each in given or ())
    for name in names:
        if not _DOMAIN.fullmatch(name):
            what = f"--allowed-media-domains is {limits.shortened(name)!r}, which is no domain"
            raise UsageError(what, "for example upload.wikimedia.org")
    return names


@dataclass(frozen=True)
class KeepAlive:
    """How long a model stays in memory without requests."""

    seconds: float | None = DEFAULT_KEEP_ALIVE_S  # None: as long as the server runs

    @classmethod
    def of(cls, given: float | str) -> "KeepAlive":
        """Parse seconds or Ollama's notation (5m, 1h30m). Negative: unloads never. Raises ParameterError."""
        text = str(given).strip()
        parts = _PART.findall(text.removeprefix("-"))
        if parts and "".join(number + unit for number, unit in parts) == text.removeprefix("-"):
            seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
            return cls(None if text.startswith("-") else seconds)
        with suppress(ValueError):
            if (seconds := float(text)) == seconds:
                return cls(None if seconds < 0 or seconds == float("inf") else seconds)
        shown = limits.shortened(text)
        raise ParameterError("keep_alive", f"is {shown!r}, which is no time", "for example 10m, 90 (seconds), or -1")
