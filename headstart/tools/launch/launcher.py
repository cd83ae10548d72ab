"""Programs that `launch` runs: their data, installation and arguments by version; base class of all launchers."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headstart.errors import UsageError
from headstart.formats.json_object import read_packaged
from headstart.tools.launch.arguments import Version, at_least, parse_version, published, version_text
from headstart.tools.launch.command_line import CommandLine
from headstart.tools.launch.model_facts import ModelFacts
from headstart.tools.launch.spec import PLATFORMS, LaunchPlan, LaunchSpec, LaunchStep, option_flag


@dataclass(frozen=True)
class EngineFlag:
    """An argument of a plug-in's engine, and the versions that have it."""

    name: str
    source: str  # file of the engine's repository that declares it
    since: str = "0"
    until: str | None = None  # the first version without it

    def serves(self, version: Version) -> bool:
        return at_least(version, self.since) and (self.until is None or not at_least(version, self.until))


@dataclass(frozen=True)
class InstalledProgram:
    program: Path
    python: Path | None  # beside a Python program
    distribution: str | None  # the Python distribution that installed it
    version: Version | None  # None: unknown


def other_engine_hint(word: str) -> str:
    """What to do about an engine that has no launcher; empty for other words."""
    rows = read_packaged("headstart.tools.launch", "other_engines.json")
    return str(rows.get(re.sub(r"[-_.]", "", word.lower()), ""))


def engine_data(engine: str) -> Mapping[str, Any]:
    return dict(read_packaged("headstart.tools.launch.launchers", f"{engine}.json"))


class EngineProgram:
    """A program by its data: `class Vllm(EngineLauncher, data="vllm.json")` reads them from the launchers' folder."""

    name: ClassVar[str]
    title: ClassVar[str]
    program: ClassVar[str]
    distributions: ClassVar[Sequence[str]] = ()  # Python distributions that install it
    newest: ClassVar[str]  # the newest release that was read; assumed where none is installed or named
    start_module: ClassVar[str] = ""  # the Python module that serves, for installations whose program does not run
    flags: ClassVar[Sequence[EngineFlag]] = ()
    """Arguments of a plug-in's engine; those of other engines are in published.json."""

    def __init_subclass__(cls, data: str | None = None) -> None:
        if data is not None:
            cls.name = data.removesuffix(".json")
            known = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", ())}
            for name, value in engine_data(cls.name).items():
                assert name in known, f"{data}: {name} is unknown"
                setattr(cls, name, value)

    def supports(self, version: Version, name: str, value: object = None) -> bool:
        """Does this version take an argument, or a config key (`speculative_config.method`), with this value?"""
        if self.flags:
            return any(flag.name == name and flag.serves(version) for flag in self.flags)
        known = published(self.name)
        if known is None or not known.has(name, version):
            return False
        return value is None or not known.words(name) or known.has(f"{name}={value}", version)

    def versions_with(self, name: str, value: object = None) -> str:
        """Returns the versions that take an argument, for people."""
        ranges = [f"{flag.since} or newer" if flag.until is None else f"before {flag.until}"
                  for flag in self.flags if flag.name == name]  # fmt: skip
        known = published(self.name)
        read = known.versions if known else ()
        return ", ".join(ranges or [each for each in read if self.supports(parse_version(each), name, value)]) or "none"

    def find_installed(self, place: str | None) -> InstalledProgram | None:
        """The program at `place` (a path, or its folder), or in PATH. Raises UsageError where `place` has none."""
        name = place or self.program
        if place and (folder := Path(place).expanduser()).is_dir():
            own, python = folder / self.program, folder / "python"
            name = str(python if python.exists() and not own.exists() else own)
        found = shutil.which(str(Path(name).expanduser()) if "/" in name else name)
        if found is None:
            if place:
                raise UsageError(f"--program: {place} is no program", f"give the path of {self.program}")
            return None
        return self._describe(Path(found))

    def _describe(self, program: Path) -> InstalledProgram:
        """The version comes from the distribution beside the program: asking the program can take half a minute."""
        python = program.with_name("python")
        for distribution in self.distributions:
            pattern = f"lib/python3*/site-packages/{distribution}-*.dist-info"
            for folder in sorted(program.parent.parent.glob(pattern)):
                version = parse_version(folder.name.removeprefix(f"{distribution}-").removesuffix(".dist-info"))
                return InstalledProgram(program, python if python.exists() else None, distribution, version)
        is_elsewhere = bool(self.distributions and self.start_module)  # a Python program
        return InstalledProgram(program, None, None, None if is_elsewhere else _ask_version(program))

    def choose_version(self, named: str | None, installed: InstalledProgram | None) -> tuple[Version, bool]:
        """Returns the version to write for, and whether it is only assumed."""
        known = parse_version(named) if named is not None else installed.version if installed else None
        return (known, False) if known else (parse_version(self.newest), True)

    def resolve(self, words: Sequence[str], installed: InstalledProgram | None) -> list[str]:
        """A command with the programs that are installed; one without its own distribution runs as a module."""
        if installed is not None and words[0] == "python" and installed.python:
            return [str(installed.python), *words[1:]]
        if installed is None or words[0] != self.program:
            return list(words)
        if self.start_module and installed.python and installed.distribution != self.distributions[0]:
            return [str(installed.python), "-m", self.start_module, "--model", *words[2:]]  # of PROGRAM serve MODEL ...
        return [str(installed.program), *words[1:]]


def _ask_version(program: Path) -> Version | None:
    """llama.cpp prints `version: 11434 (abc)`, and `build 0` where it was built outside its repository."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stdout + done.stderr
    match = re.search(r"version: b?(\d{3,})\b", text) or re.search(r"build (\d{3,})", text)
    if match:
        return (int(match[1]),)
    plain = re.search(r"\d+\.\d+\.\d+", text)
    return parse_version(plain[0]) if plain and "build 0" not in text else None


PLAIN_YAML = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z/][A-Za-z0-9_./-]*", re.IGNORECASE)


def dump_yaml(*documents: Mapping[str, Any]) -> str:
    """Returns YAML as block collections; texts of several lines are blocks, other unusual texts have double quotes."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
            return super().increase_indent(flow, False)

        def represent_text(self, text: str) -> Any:
            style = "|" if text.endswith("\n") else None if PLAIN_YAML.fullmatch(text) else '"'
            return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.add_representer(str, Dumper.represent_text)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=math.inf))


BOTH_SIDES = "a prefill node drafts nothing, but needs the heads: both sides must have the same caches"
OFFLOAD = "drafting over an offloaded KV cache has corrupted texts in some versions: compare with --depth 0"


class CommandBuilder:
    def __init__(self, program: EngineProgram, version: Version) -> None:
        self.program, self.version = program, version
        self.words: list[str] = []

    def has(self, name: str) -> bool:
        return self.program.supports(self.version, name)

    def require(self, name: str, value: object = None) -> None:
        """Raises UsageError for an argument, a config key, or a value, that this version lacks."""
        if not self.program.supports(self.version, name, value):
            shown = name.rpartition(".")[2] + (f" {value}" if isinstance(value, str) else "")
            what = f"{self.program.title} {version_text(self.version)} has no {shown}"
            raise UsageError(what, f"versions with it: {self.program.versions_with(name, value)}")

    def add(self, name: str, value: object = None) -> None:
        """Adds a flag with its value; None: a switch."""
        self.require(name, value)
        self.words += [name] if value is None else [name, str(value)]

    def add_all(self, flags: Mapping[str, object]) -> None:
        for name, value in flags.items():
            self.add(name, value)

    def add_sizes(self, sizes: Mapping[str, int]) -> None:
        """Adds flags whose value is not 1, the default of all sizes."""
        self.add_all({name: size for name, size in sizes.items() if size > 1})

    def config(self, name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a config after checking its keys and values."""
        for key, value in entries.items():
            self.require(f"{name}.{key}", value)
        return dict(entries)

    def add_json(self, flag: str, entries: Mapping[str, Any]) -> None:
        """Adds a flag whose value is a JSON config."""
        self.add(flag, json.dumps(self.config(flag.lstrip("-").replace("-", "_"), entries)))


class ServerBuilder(CommandBuilder):
    program: "EngineLauncher"

    def __init__(self, launcher: "EngineLauncher", facts: ModelFacts, spec: LaunchSpec, version: Version) -> None:
        super().__init__(launcher, version)
        self.facts, self.spec, self.plan = facts, spec, LaunchPlan()

    def note(self, text: str) -> None:
        self.plan.notes.append(text)

    def add_settings(self, settings: Mapping[str, Any]) -> None:
        """Adds common options; True is a switch. Raises UsageError for an option that the engine has no flag for."""
        for name, value in settings.items():
            if value is None or value is False:
                continue
            if (flag := self.program.flag_of(name)) is None:
                what = f"{self.program.title} has nothing for {option_flag(name)}"
                raise UsageError(what, "leave it out, or give its own flag after --")
            for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
                self.add(flag, None if each is True else each)

    def serve(self, *words: str, node: int = 0, where: str = "", answers: bool = True, **environment: str) -> None:
        """Adds a step that serves; the user's own arguments come last."""
        environment = {**self.spec.device_environment, **environment}
        port = self.spec.port if answers else None
        step = LaunchStep((*words, *self.spec.extra), where, environment=environment, node=node, port=port)
        self.plan.serve.append(step)


class EngineLauncher(EngineProgram):
    """An engine that `launch` writes commands for."""

    modules: ClassVar[Sequence[str]] = ()  # words that mark a command line as this engine's, beside the program
    images: ClassVar[Mapping[str, str]]
    """Platform -> container image; empty: the engine runs there, but no image is published."""
    alternatives: ClassVar[Mapping[str, str]] = {}  # platform without this engine -> what to use there
    moved_images: ClassVar[Mapping[str, str]] = {}  # former image repository -> today's
    format: ClassVar[str] = ""  # format of the checkpoints that it drafts with, safetensors or gguf; empty: any
    format_hint: ClassVar[str] = "give safetensors"
    unsupported: ClassVar[Mapping[str, str]] = {}  # option that it cannot take -> what to do
    has_subcommands: ClassVar[bool] = False  # other commands than `serve`
    runs_copies: ClassVar[bool] = False
    """--dp starts separate servers behind a router; other engines divide their data themselves."""
    pd_router: ClassVar[str] = ""
    """The router (fleet.ROUTERS) for prefill/decode disaggregation; empty: the engine has none."""
    bootstrap_port: ClassVar[int | None] = None
    """Port of the first prefill server's bootstrap, where the router has to know it."""
    has_cpu_tp: ClassVar[bool] = False  # it takes --tp on a CPU
    model_first: ClassVar[bool] = False  # the model follows the program without a flag. (After `serve` it always does.)
    health: ClassVar[str] = "/health"
    settings: ClassVar[Mapping[str, str]] = {}  # common option -> flag
    methods: ClassVar[Mapping[str, str]] = {}  # kind of drafter -> the engine's word for it
    renamed: ClassVar[Mapping[str, str]] = {}  # former flag -> today's
    removed: ClassVar[Mapping[str, str]] = {}  # former flag -> why it is gone, or what replaces it
    replaced: ClassVar[Mapping[str, Sequence[str]]] = {}  # former switch -> the flag and value of today
    switches: ClassVar[Sequence[str]] = ()  # flags of `removed` without a value

    def plan(self, facts: ModelFacts, spec: LaunchSpec, version: Version) -> LaunchPlan:
        """Returns the commands of one server. Raises UsageError for what the engine or this version cannot do."""
        if self.format == "gguf" and facts.format != "gguf" and facts.local:
            raise UsageError(f"{facts.source} is no GGUF file", self.format_hint)
        if self.format == "safetensors" and facts.format == "gguf":
            raise UsageError(f"{facts.source} is a GGUF file, which {self.title} cannot draft with", self.format_hint)
        for option, hint in self.unsupported.items():
            if getattr(spec, option):
                raise UsageError(f"{self.title} cannot take {option_flag(option)}", hint)
        server = ServerBuilder(self, facts, spec, version)
        self.build(server)
        return server.plan

    def build(self, server: ServerBuilder) -> None:
        """Writes the commands for `server.facts` and `server.spec`. Raises UsageError."""
        raise NotImplementedError

    def modernize(self, line: CommandLine, version: Version) -> None:
        """Changes an old command line in place, beyond `renamed` and `removed`."""

    def modernize_config(self, text: str, version: Version) -> tuple[str, list[str], list[str]]:
        """Returns an old configuration file brought up to date, changes and warnings."""
        return text, [], []

    def arguments_of(self, step: LaunchStep) -> tuple[str, ...]:
        """Returns the engine's arguments of a serving command, the model in front included."""
        begin = next(place for place, word in enumerate(step.words) if word in (self.program, *self.modules))
        return step.words[begin + 1 :]

    def repositories(self) -> set[str]:
        return {image.rpartition(":")[0] for image in self.images.values() if image} | self.moved_images.keys()

    def check_platform(self, platform: str) -> None:
        if platform not in self.images:
            hint = self.alternatives.get(platform, f"it runs on {', '.join(self.images)}")
            raise UsageError(f"{self.title} does not run on {PLATFORMS.get(platform, platform)}", hint)

    def flag_of(self, option: str) -> str | None:
        """Returns the flag of a common option; None where no version has one."""
        own = option_flag(option)
        return self.settings.get(option, own if any(flag.name == own for flag in self.flags) else None)

    def method_of(self, spec: LaunchSpec) -> str:
        """Returns the engine's word for the kind of drafter. Raises UsageError for an unknown kind."""
        if spec.method not in self.methods:
            hint = f"it takes {', '.join(self.methods)}"
            raise UsageError(f"{self.title} cannot draft with a head of kind {spec.method}", hint)
        return self.methods[spec.method]
