"""`headstart serve MODEL MORE`, `--models DIR`, and [models.NAME] of headstart.toml: several models on one server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.options import OptionGroup, as_depth, option
from headstart.cli.settings import Settings, close_to
from headstart.config import EngineConfig, config_fields
from headstart.errors import UsageError

if TYPE_CHECKING:
    from headstart.server.app import ServerConfig
    from headstart.server.entries import KeepAlive, Offer
    from headstart.server.shelf import Shelf

OF_ONE = ("served_model_name", "chat_template", "tool_call_parser", "reasoning_parser", "record", "role", "prefill")
"""Options of the server that belong to one model."""
GB = 10**9
Prepare = Callable[[str | None, EngineConfig], EngineConfig]


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(OptionGroup):
    """Several models: which, and how long they stay."""

    panel = "Several models"

    models: Path | None = option("Folder: each model in it can be asked for, by its name there.")
    keep_alive: str = option("How long a model stays in memory without requests: 10m, 90, 0, -1 (ever).", default="5m")
    memory: float | None = option("GB that models may take together. Default: what is free.", "--memory", metavar="GB")

    def check(self) -> None:
        """Raises UsageError."""
        if self.memory is not None and not 0 < self.memory < 10**6:
            raise UsageError(f"--memory is {self.memory:g}, but must be above 0 and at most a million")
        if self.models is not None and not self.models.is_dir():
            raise UsageError(f"--models: {self.models} is no folder", "name the folder that holds the models")
        self.kept()

    def kept(self) -> KeepAlive:
        """Raises UsageError."""
        from headstart.server.entries import KeepAlive

        try:
            return KeepAlive.of(self.keep_alive)
        except UsageError as error:
            raise UsageError(f"--{error.message}", error.hint) from None


def wants_several(models: Sequence[str], options: ModelsOptions, settings: Settings) -> bool:
    return len(models) > 1 or options.models is not None or bool(settings.models)


def shelf(
    models: Sequence[str],
    options: ModelsOptions,
    settings: Settings,
    config: EngineConfig,
    serving: ServerConfig,
    prepare: Prepare,
) -> Shelf:
    """All models; the first that the command line names is loaded. `prepare`: what is known of a model here, asked when
    it is loaded. Raises UsageError or ModelError."""
    from headstart.server.app import shelf_of

    for name in OF_ONE:
        if getattr(serving, name, None):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is for one model, but this server has several", "leave it out")
    if config.head is not None:
        raise UsageError("--head is for one model, but this server has several", "[models.NAME] takes head")
    memory = None if options.memory is None else int(options.memory * GB)
    offers = _offers(models, options.models, settings, config, prepare)
    found = shelf_of(offers, replace(serving, keep_alive=options.kept(), memory=memory))
    if models:
        found.load_first()
    return found


def _offers(
    models: Sequence[str], folder: Path | None, settings: Settings, config: EngineConfig, prepare: Prepare
) -> list[Offer]:
    from headstart.server.entries import Offer, models_in

    named: list[tuple[str, str, EngineConfig]] = [(model, model, config) for model in models]
    named += [_of_table(name, table, config, settings) for name, table in settings.models.items()]
    for name, path in (models_in(folder) if folder else {}).items():
        place = str(path) if path.is_absolute() else f"./{path}"  # a path, no repo id, also when it is gone
        named.append((name, place, config))
    if not named:
        raise UsageError(
            f"--models: there is no model in {folder}", "each is a folder with config.json, or a .gguf file"
        )
    names = [name for name, *_ in named]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two models are called {name}", "[models.NAME] of headstart.toml gives them other names")
    return [Offer(names=(name,), path=path, config=own, prepare=prepare) for name, path, own in named]


def _of_table(name: str, table: Any, config: EngineConfig, settings: Settings) -> tuple[str, str, EngineConfig]:
    """A [models.NAME]: `path`, and options of the engine. Raises UsageError that says where it is wrong."""
    place = f"{settings.file} [models.{name}]"
    if not isinstance(table, Mapping) or not isinstance(table.get("path"), str) or not table["path"]:
        raise UsageError(f"{place} has no path", f'for example path = "./{name}"')
    values = {key.replace("-", "_"): value for key, value in table.items() if key != "path"}
    for key in values:
        if key not in config_fields():
            known = [each.replace("_", "-") for each in config_fields()]
            raise UsageError(f"{place}: {key} is no setting", close_to(key.replace("_", "-"), known))
    for key in ("depth", "draft_vocab"):
        if isinstance(values.get(key), str):
            values[key] = as_depth(values[key])
    try:
        return name, table["path"], replace(config, **values)
    except UsageError as error:
        raise UsageError(f"{place}: {error.message}", error.hint) from None
