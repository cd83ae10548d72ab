"""`headstart serve`: serves a model over HTTP, in this process or as several replicas behind a router."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.options import ServingOptions, read_template, with_adapted
from headstart.cli.parser import command
from headstart.cli.render import finish, progress
from headstart.cli.serve_engine import OtherEngineOptions, launch_options
from headstart.cli.serve_models import ServedModelsOptions, model_manager
from headstart.cli.settings import Settings
from headstart.cli.vllm_flags import VllmFlags, rewrite
from headstart.config import EngineConfig
from headstart.errors import UsageError
from headstart.options import OptionGroup, option
from headstart.server.options import ServerOptions, media_domains
from headstart.wording import LEAVE_OUT, flag_of

log = logging.getLogger("headstart.server")

if TYPE_CHECKING:
    from headstart.server.app import ServerConfig
    from headstart.server.replicas.group import ReplicaId


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    """Raises UsageError unless the files are a certificate and its key, which is not encrypted."""
    if (certificate is None) != (key is None):
        raise UsageError("TLS needs both --ssl-certfile and --ssl-keyfile", "give both or none")
    if certificate is None or key is None:
        return
    for flag, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        if not path.is_file():
            raise UsageError(f"{flag}: {path} is not a file", "is the path right?")
    import ssl

    try:
        if b"ENCRYPTED" in key.read_bytes():
            raise UsageError(f"--ssl-keyfile {key} is encrypted", f"openssl pkey -in {key} -out plain.pem decrypts it")
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:  # SSLError is one
        reason = getattr(error, "reason", "") or (error.strerror or "").partition(" (_ssl")[0]
        hint = "both are PEM files: a certificate, and the key that belongs to it"
        raise UsageError(f"--ssl-certfile {certificate}, --ssl-keyfile {key}: {reason}", hint) from None


def check_role(serving: ServerOptions, config: EngineConfig) -> ServerOptions:
    """The options with the role; `--prefill` alone makes a decode server. Raises UsageError for contradictions."""
    role = serving.role or ("decode" if serving.prefill is not None else None)
    if role == "decode" and serving.prefill is None:
        raise UsageError("--role decode needs a prefill server", "name it: --prefill http://HOST:PORT")
    if role == "prefill" and serving.prefill is not None:
        raise UsageError("--role prefill computes prompts itself", "--prefill is for --role decode")
    if role is not None and config.kv_spill is None:
        raise UsageError(f"--role {role} transfers prompts in files", "name their folder: --kv-spill DIR")
    if serving.prefill is not None:
        from headstart.server.prefill_client import prefill_url

        prefill_url(serving.prefill)
    return replace(serving, role=role)


def check_keys(keys: list[str] | None, file: Path | None) -> None:
    """Check --api-key and --api-key-file. Raises UsageError for an empty or undecodable key and an invalid file."""
    if not all(key.strip() for key in keys or ()) or (not keys and os.environ.get("HEADSTART_API_KEY") == ""):
        raise UsageError("the API key is empty: everybody could use the server", "give one, or leave it out")
    if not all(key.isprintable() for key in keys or ()):
        raise UsageError("--api-key: the key has bytes that are not printable text", "use letters, digits and signs")
    if file is not None:
        from headstart.server.accounts import Accounts

        Accounts.of(keys or (), file)


def log_loading(model: str | None, log_format: str, process: str = "") -> None:
    """Log that the model is being loaded, before modules that take long to import."""
    from headstart.server.process import set_up_logs

    set_up_logs(log_format, process=process)
    log.info("loading %s", model or "the default model")


def with_tuned(model: str | None, config: EngineConfig) -> EngineConfig:
    """The config with the drafter and depth that `headstart tune` has found, if any; prints them."""
    from headstart.tools.saved import load_setting

    setting = load_setting(model, config)
    if setting is None:
        return config
    print(f"headstart: tuned: {setting}", file=sys.stderr)
    return replace(config, drafter=setting.drafter, depth=setting.depth)


@command(
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
    rewrite=rewrite,
)
def run(
    serving: ServerOptions, named: ServedModelsOptions, engine: ServingOptions, vllm: VllmFlags,
    other: OtherEngineOptions, replicas: ReplicaOptions, settings: Settings,
) -> int:  # fmt: skip
    """Serve one or several models over HTTP with the APIs of OpenAI, vLLM, Anthropic and Ollama."""
    _check_tls(serving.ssl_certfile, serving.ssl_keyfile)
    named.check()
    check_keys(serving.api_key, serving.api_key_file)
    media_domains(serving.allowed_media_domains)
    other.check()
    replica_id = replicas.replica_id
    if other.engine_name is not None and (replicas.replicas is None or replica_id is not None):
        return _serve_with_other_engine(other.engine_name, other.dry_run, named, serving, engine, vllm)
    config = vllm.apply(engine.config)
    has_several = named.has_several(settings)
    if named.memory is not None and not has_several:
        raise UsageError("--memory is for several models, but this server has one", LEAVE_OUT + ", or set --kv-blocks")
    if replicas.replicas is not None and replica_id is None:
        if has_several:
            raise UsageError("--replicas serve one model", "leave out the others, or --replicas")
        if other.engine_name is not None:
            raise UsageError("--replicas are headstart's own engines", "leave out --engine, or --replicas")
        check_role(serving, config)
        return supervise_replicas(replicas, config, serving.chosen())
    may_tune = not engine.given & {"depth", "drafter", "rule"} and config.depth_by_batch is None
    if has_several and config.lora:
        raise UsageError("--lora belongs to one model, but several are served", "serve that model alone")
    if replica_id is None and has_several:
        return _serve_several(named, settings, config, _server_config(serving, replicas), may_tune=may_tune)
    return _serve_one(named.first, config, check_role(serving, config), replicas, may_tune=may_tune)


def _serve_with_other_engine(
    name: str, dry: bool, models: ServedModelsOptions, serving: ServerOptions, engine: ServingOptions, vllm: VllmFlags
) -> int:
    from headstart.cli import launch
    from headstart.tools.launch.run import run as dry_run

    if len(models.model or ()) > 1:
        raise UsageError("another engine serves one model", "leave the others out")
    options = launch_options(name, models.first, serving, engine, vllm.given)
    if dry:
        return finish(dry_run(options), as_json=False)
    return launch.start(options, stay=True, as_json=False)


def _serve_several(
    named: ServedModelsOptions, settings: Settings, config: EngineConfig, serve_config: ServerConfig, *, may_tune: bool
) -> int:
    if named.first is not None:
        log_loading(named.first, serve_config.log_format)
    from headstart.server.process import listening
    from headstart.server.run import serve

    def prepare(model: str | None, config: EngineConfig) -> EngineConfig:
        return with_adapted(model, with_tuned(model, config) if may_tune else config)

    with listening(serve_config.host, serve_config.port) as sockets:
        serve(model_manager(named, settings, config, serve_config, prepare), serve_config, sockets)
    return 0


def _serve_one(
    model: str | None, config: EngineConfig, serving: ServerOptions, replicas: ReplicaOptions, *, may_tune: bool
) -> int:
    replica_id = replicas.replica_id
    log_loading(model, serving.log_format, replica_id.process if replica_id else "")
    cache_bytes = start_replica(replica_id) if replica_id is not None else None
    if may_tune:
        config = with_tuned(model, config)
    plain, config = config, with_adapted(model, config)
    template = read_template(serving.chat_template)

    from headstart.api import LLM
    from headstart.kernels.backend import CachesWeights
    from headstart.server.app import single_model_manager
    from headstart.server.process import listening
    from headstart.server.records import prepare_folder
    from headstart.server.run import serve

    if serving.record is not None:
        prepare_folder(serving.record)
    serve_config = _server_config(serving, replicas)
    with listening(serve_config.host, serve_config.port) as sockets:  # before the model is loaded
        with progress("loading", log.info) as report_progress:
            llm = LLM(model, config, report_progress, cache_bytes=cache_bytes)
            backend = llm.model.backend
            if replica_id is not None and isinstance(backend, CachesWeights) and backend.wrote_weight_cache:
                llm.close()  # load again: weights that another replica has mapped are shared
                llm = LLM(model, config, report_progress, cache_bytes=cache_bytes)
        if template is not None:
            llm.use_chat_template(template)
        serve(single_model_manager(llm, serve_config), serve_config, sockets, lambda: with_adapted(model, plain).head)
    return 0


def _server_config(serving: ServerOptions, replicas: ReplicaOptions) -> ServerConfig:
    """Raises UsageError."""
    from headstart.server.app import ServerConfig

    settings = serving.chosen() | {"replica": replicas.replica_id}
    if replicas.join is not None and replicas.replica_id is None:
        from headstart.server.replicas.router import check_address

        check_address(replicas.join, serving.host)
        settings["join"] = replicas.join
    return ServerConfig(**settings)


SINGLE_PROCESS = {
    "allow_lora_updates": "a client would change one replica only: name all adapters by --lora",
    "record": "one process writes records",
    "ssl_certfile": "the router speaks HTTP: let a proxy in front of it speak TLS",
}
"""Server options that replicas cannot have -> why."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(OptionGroup):
    """Several engines of one model."""

    panel = "Several engines"

    replicas: str | None = option(
        "Engines behind a router on this machine: a number, or numa (one per NUMA node).", metavar="N|numa"
    )
    join: str | None = option(
        "Address of a router that sends requests to this server.", metavar="URL", panel=f"{panel}, more", is_rare=True
    )
    replica: str | None = option("Internal: the replica that this process is.", is_hidden=True)

    @property
    def replica_id(self) -> ReplicaId | None:
        """The replica of this process; None: no replica. Raises UsageError."""
        if self.replica is None:
            return None
        from headstart.server.replicas.group import ReplicaId

        return ReplicaId.of(self.replica)


def start_replica(replica_id: ReplicaId) -> int:
    """Bind this process to its CPUs, and end it with its supervisor; returns the bytes for its caches."""
    from headstart.system import end_with_parent, set_affinity

    end_with_parent()
    group = replica_id.group()
    if cpus := group.replicas[replica_id.number].cpus:
        set_affinity(cpus)
    return group.cache_bytes


def supervise_replicas(replicas: ReplicaOptions, config: EngineConfig, serving: dict[str, Any]) -> int:
    """Start and supervise the replicas; returns the exit code. `serving`: ServerOptions by name. Raises UsageError."""
    from headstart import machine
    from headstart.server.process import listening, set_up_logs
    from headstart.server.replicas.group import MEMORY_SHARE, divide_cpus
    from headstart.server.replicas.router import check_address, check_installed
    from headstart.server.replicas.supervisor import SupervisorSettings, supervise

    for name, why in SINGLE_PROCESS.items():
        if serving.get(name):
            raise UsageError(f"{flag_of(name)} does not go with --replicas", why)
    if serving.get("role") == "prefill":
        raise UsageError(
            "--role prefill does not go with --replicas: a decode server asks one server for a prompt and its blocks",
            "start it by itself, and give the replicas its address: --prefill URL",
        )
    if config.device == "cuda":
        raise UsageError("--replicas are for the CPU", "one engine per GPU: headstart serve on each, with --join")
    assert replicas.replicas is not None
    shares = divide_cpus(replicas.replicas, config.threads, machine.nodes(), machine.threads().quota)
    check_installed()
    if replicas.join is not None:
        check_address(replicas.join, serving["host"])
    with listening(serving["host"], serving["port"]) as sockets:
        set_up_logs(serving["log_format"])
        return supervise(
            SupervisorSettings(
                words=tuple(sys.argv[1:]),
                shares=shares,
                cache_bytes=int(machine.memory().available * MEMORY_SHARE) // len(shares),
                origins=serving.get("allowed_origins", ()),
                shutdown_timeout=serving["shutdown_timeout"],
                join=replicas.join,
            ),
            sockets,
        )
