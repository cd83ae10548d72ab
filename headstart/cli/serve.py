"""`headstart serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.adapt import with_adapted
from headstart.cli.help import MORE
from headstart.cli.options import OptionGroup, ServingOptions, model_names, option, read_text
from headstart.cli.render import finish, progress
from headstart.cli.serve_elsewhere import OtherEngine, launch_options
from headstart.cli.serve_replicas import ReplicaOptions, begin, check_alone, supervised
from headstart.cli.serve_several import ModelsOptions, shelf, wants_several
from headstart.cli.settings import of_context
from headstart.cli.vllm_flags import VllmFlags
from headstart.cli.vllm_words import ServeCommand
from headstart.config import EngineConfig
from headstart.errors import UsageError

if TYPE_CHECKING:
    from headstart.cli.settings import Settings
    from headstart.server.app import ServerConfig

COMMAND = ServeCommand
RARE = f"{MORE}Server, more"
EXAMPLES = (
    "headstart serve --port 8000",
    "headstart serve ./my-model --head my-head --depth 3 --max-num-seqs 16",
    "headstart serve ./my-model org/model --keep-alive 10m",
    "headstart serve --models models --memory 8",
    "headstart serve --role decode --prefill http://localhost:8001 --kv-spill kv",
    "headstart serve --host 0.0.0.0 --api-key-file keys.toml",
    "headstart serve --replicas 2 --threads 1",
    "headstart serve ./my-model --engine vllm --max-num-seqs 64 --dry-run",
    "curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' "
    """-d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60}'""",
)

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="A path, a .gguf file, a Hugging Face repo id or an alias, or several; none: the default model.",
        autocompletion=model_names,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServeOptions(OptionGroup):
    """Where and how the server listens: ServerConfig, and another chat template."""

    host: str = option("Address to listen on.", default="127.0.0.1")
    port: int = option("Port; 0 takes a free one.", default=8000)
    served_model_name: list[str] | None = option("Name that requests use; may be repeated.")
    max_queue: int = option("Sequences that may wait; beyond: 503.", default=256)
    request_timeout: float | None = option("Seconds that a request may take. Default: any.")
    shutdown_timeout: int = option("Seconds that running requests get after SIGTERM.", default=30)
    api_key: list[str] | None = option("Bearer token that requests must bring; may be repeated. Or $HEADSTART_API_KEY.")
    api_key_file: Path | None = option("TOML file of more keys, with what each may have (docs/server.md).")
    allowed_origins: list[str] | None = option("Origin of web pages that may call (CORS), or *; may be repeated.")
    parse_special_tokens: bool = option(
        "Names of special tokens in messages become those tokens.", default=False, panel=RARE
    )
    ssl_certfile: Path | None = option("TLS certificate (PEM).")
    ssl_keyfile: Path | None = option("TLS key (PEM).")
    chat_template: Path | None = option("Jinja file that replaces the model's template.")
    tool_call_parser: str | None = option("Format of tool calls. Default: by the chat template.")
    reasoning_parser: str | None = option("Format of thoughts. Default: by the chat template.")
    price_per_hour: float | None = option("Dollars for this machine; /metrics then counts the cost.")
    log_format: str = option("text or json.", default="text", panel=RARE)
    access_log: bool = option("A line for every request: id, path, status, seconds.", default=False)
    no_web: bool = option("No pages for browsers at / and /dashboard.", default=False)
    role: str | None = option(
        "prefill: compute prompts for decode servers; decode: have --prefill compute them.", panel=RARE
    )
    prefill: str | None = option("URL of the server that computes prompts for this one.", metavar="URL", panel=RARE)
    record: Path | None = option("Keep token ids of prompts and answers in this folder, for headstart adapt.")
    record_limit: int = option("Megabytes that they may take; the oldest go first.", default=256, panel=RARE)

    def check(self) -> None:
        """Raises UsageError for values out of range and files that are not there."""
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port is {self.port}, but must be between 0 and 65535")
        for name, least in (("max_queue", 0), ("shutdown_timeout", 0), ("record_limit", 1)):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"--{name.replace('_', '-')} is {value}, but must be at least {least}")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise UsageError(f"--request-timeout is {self.request_timeout}, but must be above 0")
        if self.price_per_hour is not None and not self.price_per_hour >= 0:
            raise UsageError(f"--price-per-hour is {self.price_per_hour}, but must be at least 0")
        if self.log_format not in ("text", "json"):
            raise UsageError(f"--log-format is {self.log_format!r}, which is unknown", "choose text or json")
        _check_tls(self.ssl_certfile, self.ssl_keyfile)


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    """Before a model is loaded. Raises UsageError. A key with a password is asked for later, once."""
    if (certificate is None) != (key is None):
        raise UsageError("TLS needs both --ssl-certfile and --ssl-keyfile", "give both or none")
    if certificate is None or key is None:
        return
    for flag, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        if not path.is_file():
            raise UsageError(f"{flag}: {path} is not a file", "is the path right?")
    import ssl

    try:
        if b"ENCRYPTED" not in key.read_bytes():
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # SSLError is one
        reason = getattr(error, "reason", "") or (error.strerror or "").partition(" (_ssl")[0]
        hint = "both are PEM files: a certificate, and the key that belongs to it"
        raise UsageError(f"--ssl-certfile {certificate}, --ssl-keyfile {key}: {reason}", hint) from None


def check_role(serving: ServeOptions, config: EngineConfig) -> ServeOptions:
    """`--prefill` alone makes a decode server. Raises UsageError for roles that do not work like that."""
    role = serving.role or ("decode" if serving.prefill is not None else None)
    if role not in (None, "prefill", "decode"):
        raise UsageError(f"--role is {role!r}, which is unknown", "choose prefill or decode")
    if role == "decode" and serving.prefill is None:
        raise UsageError("--role decode needs a server that computes prompts", "name it: --prefill http://HOST:PORT")
    if role == "prefill" and serving.prefill is not None:
        raise UsageError("--role prefill computes prompts itself", "--prefill is for --role decode")
    if role is not None and config.kv_spill is None:
        raise UsageError(f"--role {role} hands prompts over in files", "say where they lie: --kv-spill DIR")
    if serving.prefill is not None:
        from headstart.server.handoff import Address

        Address.of(serving.prefill)
    return replace(serving, role=role)


def check_keys(keys: list[str] | None, file: Path | None) -> None:
    """A variable that is not set must not open the server. (typer takes an empty environment variable for none.) Raises
    UsageError, also for a file that is wrong."""
    if not all(key.strip() for key in keys or ()) or (not keys and os.environ.get("HEADSTART_API_KEY") == ""):
        raise UsageError("the API key is empty: everybody could use the server", "give one, or leave it out")
    if file is not None:
        from headstart.server.accounts import Accounts

        Accounts.of(keys or (), file)


def with_tuned(model: str | None, config: EngineConfig) -> EngineConfig:
    """What `headstart tune` has found for this model here, and said so; the user's own choice comes first."""
    from headstart.tools.tune.setting import kept_setting

    setting = kept_setting(model, config)
    if setting is None:
        return config
    print(f"headstart: tuned: {setting}", file=sys.stderr)
    return replace(config, drafter=setting.drafter, depth=setting.depth)


def run(
    model: Models = None,
    *,
    context: typer.Context,
    serving: ServeOptions,
    several: ModelsOptions,
    engine: ServingOptions,
    vllm: VllmFlags,
    other: OtherEngine,
    replicas: ReplicaOptions,
) -> int:
    """Serve a model over HTTP, with OpenAI's and vLLM's request fields; or several, loaded as requests name them."""
    serving.check()
    several.check()
    check_keys(serving.api_key, serving.api_key_file)
    other.check()
    member = replicas.member
    if replicas.replicas is not None and member is None:
        config, settings = vllm.apply(engine.config), of_context(context)
        check_alone(wants_several(model or (), several, settings), other.engine_name is not None)
        check_role(serving, config)
        return supervised(replicas, config, serving.chosen())
    if other.engine_name is not None:
        from headstart.cli import launch
        from headstart.tools.launch.run import run as dry_run

        if len(model or ()) > 1:
            raise UsageError("another engine serves one model", "leave the others out")
        options = launch_options(other.engine_name, model[0] if model else None, serving, engine, vllm.given)
        if other.dry_run:
            return finish(dry_run(options), as_json=False)
        return launch.started(options, stay=True, as_json=False)
    config, settings = vllm.apply(engine.config), of_context(context)
    tunes = not engine.given & {"depth", "drafter", "rule"} and config.depth_by_batch is None
    if member is None and wants_several(model or (), several, settings):
        serve_config = _server_config(serving, replicas)
        return _serve_several(model or (), several, settings, config, serve_config, tunes=tunes)
    return _serve_one(model[0] if model else None, config, check_role(serving, config), replicas, tunes=tunes)


def _serve_several(
    models: Sequence[str],
    several: ModelsOptions,
    settings: Settings,
    config: EngineConfig,
    serve_config: ServerConfig,
    *,
    tunes: bool,
) -> int:
    from headstart.server.run import serve
    from headstart.server.sockets import listening

    def known(model: str | None, config: EngineConfig) -> EngineConfig:
        return with_adapted(model, with_tuned(model, config) if tunes else config)

    with listening(serve_config.host, serve_config.port) as sockets:
        serve(shelf(models, several, settings, config, serve_config, known), serve_config, sockets)
    return 0


def _serve_one(
    model: str | None, config: EngineConfig, serving: ServeOptions, replicas: ReplicaOptions, *, tunes: bool
) -> int:
    room = begin(replicas.member) if replicas.member is not None else None
    if tunes:
        config = with_tuned(model, config)
    plain, config = config, with_adapted(model, config)
    template = read_text(serving.chat_template, "--chat-template") if serving.chat_template else None

    from headstart.api import LLM
    from headstart.kernels.backend import KeepsWeights
    from headstart.server.app import shelf_of_one
    from headstart.server.records import prepare_folder
    from headstart.server.run import serve
    from headstart.server.sockets import listening
    from headstart.text.chat import ChatTemplate

    if serving.record is not None:
        prepare_folder(serving.record)
    serve_config = _server_config(serving, replicas)
    with listening(serve_config.host, serve_config.port) as sockets:  # before a model is loaded for nothing
        with progress("loading") as report_progress:
            llm = LLM(model, config, report_progress, room=room)
            if (
                replicas.member is not None
                and isinstance(llm.model.backend, KeepsWeights)
                and llm.model.backend.could_map
            ):
                llm.close()  # what the others map is shared with them
                llm = LLM(model, config, report_progress, room=room)
        if template is not None:
            known = llm.chat_template or ChatTemplate("")
            llm.chat_template = known.replaced(template, str(serving.chat_template))
        serve(shelf_of_one(llm, serve_config), serve_config, sockets, lambda: with_adapted(model, plain).head)
    return 0


def _server_config(serving: ServeOptions, replicas: ReplicaOptions) -> ServerConfig:
    """Raises UsageError."""
    from headstart.server.app import ServerConfig

    settings = serving.chosen() | {"member": replicas.member}
    if replicas.join is not None and replicas.member is None:
        from headstart.server.replicas.join import check

        check(replicas.join, serving.host)
        settings["join"] = replicas.join
    settings.pop("chat_template", None)
    settings["web"] = not settings.pop("no_web")
    return ServerConfig(**settings)
