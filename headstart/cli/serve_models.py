"""`headstart serve` with several models: MODEL MODEL, --models DIR, and [models.NAME] of headstart.toml."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.options import NUMBERS_OR_WORDS, number_or_word
from headstart.cli.settings import Settings, suggest
from headstart.config import EngineConfig, config_fields
from headstart.errors import ParameterError, UsageError
from headstart.options import OptionGroup, argument, model_names, option
from headstart.server.options import KeepAlive
from headstart.wording import LEAVE_OUT, flag_of

if TYPE_CHECKING:
    from headstart.server.app import ServerConfig
    from headstart.server.model_manager import ModelManager, ModelSpec

SINGLE_MODEL = ("served_model_name", "chat_template", "tool_call_parser", "reasoning_parser", "record", "role",
                "prefill")  # fmt: skip
"""Server options for a single model."""
GB = 10**9
PrepareConfig = Callable[[str | None, EngineConfig], EngineConfig]


@dataclass(frozen=True, kw_only=True)
class ServedModelsOptions(OptionGroup):
    """The models of a server, and how long they stay in memory."""

    panel = "Several models"

    model: list[str] | None = argument(
        "A path, a .gguf file, a Hugging Face repo id or an alias, or several; none: the default model.",
        metavar="MODEL",
        complete=model_names,
    )
    models: Path | None = option("Folder of models; requests name a model by its file or folder name.")
    keep_alive: str = option(
        "Time that a model stays in memory without requests: 10m, 90, 0, -1 (forever).", default="5m"
    )
    memory: float | None = option(
        "Maximum GB of all models together. Default: free memory.", metavar="GB", above=0, max=10**6
    )

    def check(self) -> None:
        """Raise UsageError for a missing folder and an invalid keep-alive."""
        if self.models is not None and not self.models.is_dir():
            raise UsageError(f"--models: {self.models} is no folder", "name the folder that holds the models")
        self.parse_keep_alive()

    def parse_keep_alive(self) -> KeepAlive:
        """The value of --keep-alive. Raises UsageError."""
        try:
            return KeepAlive.of(self.keep_alive)
        except ParameterError as error:
            raise error.renamed("--keep-alive") from None

    @property
    def first(self) -> str | None:
        return self.model[0] if self.model else None

    def has_several(self, settings: Settings) -> bool:
        """True with several models, or with a folder or table of models."""
        return len(self.model or ()) > 1 or self.models is not None or bool(settings.models)


def model_manager(
    options: ServedModelsOptions, settings: Settings, config: EngineConfig, serving: ServerConfig,
    prepare: PrepareConfig,
) -> ModelManager:  # fmt: skip
    """Returns the manager of a server's models, with the first model of the command line loaded. `prepare` completes a
    model's config before loading. Raises UsageError or ModelError."""
    from headstart.server.app import multi_model_manager

    for name in SINGLE_MODEL:
        if getattr(serving, name, None):
            hint = "repeat it for further names of one model" if name == "served_model_name" else LEAVE_OUT
            raise UsageError(f"{flag_of(name)} is for one model, but this server has several", hint)
    if config.head is not None:
        raise UsageError("--head is for one model, but this server has several", "[models.NAME] takes head")
    memory = None if options.memory is None else int(options.memory * GB)
    specs = _model_specs(options.model or (), options.models, settings, config, prepare)
    manager = multi_model_manager(specs, replace(serving, keep_alive=options.parse_keep_alive(), memory=memory))
    if options.model:
        manager.load_first()
    return manager


def _model_specs(
    models: Sequence[str], folder: Path | None, settings: Settings, config: EngineConfig, prepare: PrepareConfig
) -> list[ModelSpec]:
    from headstart.hub import repo_of
    from headstart.server.model_manager import ModelSpec, default_names, models_in

    named: list[tuple[str, str, EngineConfig]] = [(model, model, config) for model in models]
    stems = {model: default_names(model)[0] for model in models}
    named += [_model_of_table(name, table, config, settings) for name, table in settings.models.items()]
    for name, path in (models_in(folder) if folder else {}).items():
        place = str(path) if path.is_absolute() else f"./{path}"  # else it may look like a repo id
        named.append((name, place, config))
    if not named:
        hint = "each is a folder with config.json, or a .gguf file"
        raise UsageError(f"--models: there is no model in {folder}", hint)
    names = [name for name, *_ in named]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two models are called {name}", "[models.NAME] of headstart.toml gives them other names")
    for _, place, _ in named:
        repo_of(place)  # a missing path fails now, not at the first request
    taken = Counter([*names, *stems.values()])  # a name alone, or a stem that several files have, is no second name
    called = {name: (stem, name) if taken[stem] == 1 else (name,) for name, stem in stems.items()}
    return [
        ModelSpec(names=called.get(name, (name,)), path=path, config=own, prepare=prepare) for name, path, own in named
    ]


def _model_of_table(name: str, table: Any, config: EngineConfig, settings: Settings) -> tuple[str, str, EngineConfig]:
    """Name, path and config of a [models.NAME] table. Raises UsageError, naming the place."""
    place = f"{settings.file} [models.{name}]"
    if not isinstance(table, Mapping) or not isinstance(table.get("path"), str) or not table["path"]:
        raise UsageError(f"{place} has no path", f'for example path = "./{name}"')
    values = {key.replace("-", "_"): value for key, value in table.items() if key != "path"}
    for key in values:
        if key not in config_fields():
            known = [each.replace("_", "-") for each in config_fields()]
            raise UsageError(f"{place}: {key} is no setting", suggest(key.replace("_", "-"), known))
    for key in NUMBERS_OR_WORDS:
        if isinstance(values.get(key), str):
            values[key] = number_or_word(values[key])
    try:
        return name, table["path"], replace(config, **values)
    except UsageError as error:
        raise UsageError(f"{place}: {error.message}", error.hint) from None
