"""Commands about this machine (`headstart doctor`, `models`, `pull`) and a running server's memory (`ps`, `stop`)."""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headstart.cli.options import OutputOptions
from headstart.cli.parser import CommandGroup, command
from headstart.cli.render import finish, print_note, print_table
from headstart.cli.settings import Settings
from headstart.errors import UsageError
from headstart.options import REQUIRED, ModelOptions, OptionGroup, argument, option

if TYPE_CHECKING:
    from headstart.core import Report


@dataclass(frozen=True, kw_only=True)
class RemoveFlags(OptionGroup):
    """The models to remove."""

    names: list[str] = argument("As headstart models lists it.", metavar="MODEL", default=REQUIRED)
    yes: bool = option("Do not ask for confirmation.", default=False)


@dataclass(frozen=True, kw_only=True)
class ServerAddress(OptionGroup):
    """A running server."""

    url: str = option("Address of the server.", default="http://127.0.0.1:8000")
    api_key: str | None = option("Bearer token of the server. Or $HEADSTART_API_KEY.")


@dataclass(frozen=True, kw_only=True)
class StopFlags(OptionGroup):
    """The model to unload."""

    name: str = argument("As headstart ps lists it.", default=REQUIRED)


@dataclass(frozen=True, kw_only=True)
class ListFlags(OptionGroup):
    """What is listed."""

    available: bool = option("List published models with heads of their own, by short name.", default=False)
    prune: bool = option("Remove packed weights and measurements, which are made again when needed.", default=False)


@command("headstart models list", "headstart models --json", "headstart models --available", "headstart models --prune")
def list_models(flags: ListFlags, output: OutputOptions) -> int:
    """List name, size, format, heads and time of last use of cached models."""
    if flags.available and flags.prune:
        raise UsageError("--available and --prune are both given", "give one of them")
    if flags.available:
        from headstart.tools.plan.sources import available

        return finish(available(), output.as_json, _print_available)
    from headstart.tools.inspect import cached

    if flags.prune:
        return finish(cached.prune(), output.as_json)
    return finish(cached.run(), output.as_json, _print_models)


@command("headstart models remove org/model", "headstart models remove smollm2-135m-mtp org/model --yes")
def remove(flags: RemoveFlags, output: OutputOptions) -> int:
    """Remove models from the caches, after confirmation."""
    from headstart.core import Report
    from headstart.tools.inspect import cached

    chosen = cached.found(flags.names)
    for each in chosen:
        if not flags.yes and not _confirm(f"remove {each.name} ({each.size / 1e6:.0f} MB)?"):
            return finish(Report(True, {"removed": [], "bytes": 0}, ["nothing was removed"]), output.as_json)
    return finish(cached.remove(chosen), output.as_json)


@command("headstart pull", "headstart pull org/model", "headstart pull smollm2-135m-mtp --json")
def pull(flags: ModelOptions, output: OutputOptions) -> int:
    """Download a model into the user cache, and check it; a cached model is only checked."""
    from headstart import hub
    from headstart.core import Report
    from headstart.models.shipped_heads import shipped_heads_at

    name, path = flags.model or hub.DEFAULT_MODEL, hub.pull(flags.model)
    heads = {kind: str(folder) for kind, folder in shipped_heads_at(path).items()}
    print_note(hub.DEMO_NOTE if name == hub.DEFAULT_MODEL else f"next: headstart chat {name}")
    return finish(Report(True, {"model": name, "path": str(path), "heads": heads}, [str(path)]), output.as_json)


@command("headstart ps", "headstart ps --url http://localhost:9000 --json")
def ps(server: ServerAddress, output: OutputOptions) -> int:
    """List the models in the memory of a running server, when they are unloaded, and its replicas."""
    from headstart.tools import loaded

    return finish(loaded.ps(server.url, server.api_key), output.as_json, _print_loaded)


@command("headstart stop small", "headstart stop small --url http://localhost:9000")
def stop(flags: StopFlags, server: ServerAddress, output: OutputOptions) -> int:
    """Unload a model of a server with several models; exit code 1: its requests are still running."""
    from headstart.tools import loaded

    return finish(loaded.stop(flags.name, server.url, server.api_key), output.as_json)


def _confirm(question: str) -> bool:
    """Ask on stderr until the answer is yes or no. Raises UsageError without a terminal."""
    if not sys.stdin.isatty():
        raise UsageError("stdin is no terminal to confirm at", "--yes removes without asking")
    while True:
        print(f"{question} [y/N]: ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if not answer:
            raise KeyboardInterrupt
        if answer.strip().lower() in ("", "y", "yes", "n", "no"):
            return answer.strip().lower().startswith("y")


def _print_models(data: dict[str, Any]) -> None:
    if not data["models"]:
        print("none yet: headstart pull fetches one; headstart models --available lists some")
    rows = [
        (each["name"], f"{each['bytes'] / 1e6:.0f} MB", each["format"] or "?", each["heads"] or "?",
         each["last_used"].partition("T")[0])
        for each in data["models"]
    ]  # fmt: skip
    if rows:
        print_table(("model", "size", "format", "heads", "last used"), rows)
    if size := sum(data["derived"].values()):
        parts = ", ".join(f"{name} {each / 1e6:.0f} MB" for name, each in data["derived"].items() if each >= 5e5)
        print(f"also cached: {parts or f'{size / 1e6:.1f} MB'}; headstart models --prune removes it")


def _print_available(data: dict[str, Any]) -> None:
    from headstart.tools.plan.sources import AVAILABLE_CONTEXT

    rows = [
        (each["name"], each["repo"], *(f"{each[size] / 1e9:.1f}" for size in ("bytes", "memory")), each["drafts"],
         each["gain"] or "")
        for each in data["models"]
    ]  # fmt: skip
    print_table(("name", "repository", "size\nGB", "memory\nGB", "drafts", "gain"), rows)
    context = f"{AVAILABLE_CONTEXT:,} positions"
    print(f"Size: the text part in bf16. Memory: with {context}; --quantization int4\ntakes about a third.")
    print("Gain: as reported for other engines; headstart bench NAME measures it here.")
    for each in data["models"]:
        if each["gain"]:
            print(f"  {each['name']} {each['gain']}: {each['gain_source']}")
    print(f"With a head in this package: {', '.join(data['with_packaged_head'])}.")
    print(f"headstart pull NAME fetches a model. The default, {data['default']}, is a\ntiny demo model.")


def _print_loaded(data: dict[str, Any]) -> None:
    from headstart.tools.loaded import until

    if not data["models"]:
        print("no model is in memory")
        return
    rows = []
    for each in data["models"]:
        size = f"{each['bytes'] / 1e6:.0f} MB"
        rows.append((each["name"], size, each["context"], until(each["expires_at"])))
    print_table(("model", "weights", "context", "leaves"), rows)
    if not data["replicas"]:
        return
    print()
    replicas = []
    for each in data["replicas"]:
        runs, waits = ("" if each[name] is None else f"{each[name]:.0f}" for name in ("running", "waiting"))
        cpus = ",".join(map(str, each["cpus"])) or "any"
        replicas.append((each["number"], each["state"], runs, waits, each["starts"], cpus, each["pid"], each["url"]))
    print_table(("replica", "state", "runs", "waits", "starts", "cpus", "process", "address"), replicas)


GROUP = CommandGroup(
    {"list": list_models, "remove": remove},
    default="list",
    help="List the models in the caches of this machine, or remove some. Without a command: list.",
    examples=("headstart models", "headstart models --available", "headstart models remove org/model"),
)


@command("headstart doctor", "headstart doctor --json", "headstart doctor --config my-settings.toml")
def doctor(settings: Settings, output: OutputOptions) -> int:
    """Show the backend and the reason for it, CPU, threads, memory, compiler, GPU, versions, cached models and
    settings."""
    from headstart.tools import doctor as doctor_run

    return finish(_with_settings(doctor_run.run(), settings), output.as_json)


def _with_settings(report: "Report", settings: Settings) -> "Report":
    file = str(settings.file) if settings.file else None
    order = f"command line > environment > {file or 'headstart.toml (none here)'} > default"
    rows, lines = [], [f"{'settings':10} {order}"]
    for each in (*settings.from_environment, *settings.from_file):
        by = settings.replaced_by(each)
        rows.append({
            "option": f"{each.scope} --{each.name}".strip(), "value": each.shown, "place": each.place,
            "hidden_by": by.place if by else None,
        })  # fmt: skip
        hidden = f" ({by.place} comes first)" if by else ""
        lines.append(f"{'':10} {rows[-1]['option']} {each.shown}: {each.place}{hidden}")
    lines += [f"{'':10} model {name}: {file} [models.{name}]" for name in settings.models]
    data = {"file": file, "set": rows, "models": list(settings.models)}
    return replace(report, data=report.data | {"settings": data}, lines=[*report.lines, *lines])
