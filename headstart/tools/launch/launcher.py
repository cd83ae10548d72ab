"""Engine programs that `launch` runs: data files, installed versions, flags, and the base class of all launchers."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headstart import registry
from headstart.errors import UsageError
from headstart.files import user_path
from headstart.formats.json_object import read_packaged
from headstart.tools.launch.arguments import Version, is_within, parse_version, published, version_text
from headstart.tools.launch.command_line import CommandLine
from headstart.tools.launch.model_facts import ModelFacts
from headstart.tools.launch.spec import PLATFORMS, LaunchPlan, LaunchSpec, LaunchStep, option_flag
from headstart.wording import LEAVE_OUT


@dataclass(frozen=True)
class EngineFlag:
    """A flag of an engine that a plug-in adds, and the versions that have the flag."""

    name: str
    source: str  # file of the engine's repository that declares it
    since: str = "0"  # first version with the flag
    until: str | None = None  # first version without the flag


@dataclass(frozen=True)
class InstalledProgram:
    program: Path
    python: Path | None  # interpreter beside the program; None for a program that is not Python
    distribution: str | None  # Python distribution that installed the program; None if unknown
    version: Version | None  # None: unknown


def other_engine_hint(word: str) -> str:
    """Returns advice for the name of an engine without a launcher (other_engines.json); "" for other words."""
    rows = read_packaged("headstart.tools.launch", "other_engines.json")
    return str(rows.get(re.sub(r"[-_.]", "", word.lower()), ""))


def engine_data(engine: str) -> Mapping[str, Any]:
    return dict(read_packaged("headstart.tools.launch.launchers", f"{engine}.json"))


class EngineProgram:
    """A program. `class Vllm(EngineLauncher, data="vllm.json")` sets its class variables from launchers/vllm.json."""

    name: ClassVar[str]
    title: ClassVar[str]
    program: ClassVar[str]
    distributions: ClassVar[Sequence[str]] = ()  # Python distributions that install the program
    newest: ClassVar[str]  # newest recorded release; used if no version is installed or named
    start_module: ClassVar[str] = ""  # Python module that starts the server, for installations without the program
    flags: ClassVar[Sequence[EngineFlag]] = ()
    """Flags of an engine that a plug-in adds. Flags of built-in engines are in published.json."""

    def __init_subclass__(cls, data: str | None = None) -> None:
        if data is not None:
            cls.name = data.removesuffix(".json")
            known = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", ())}
            for name, value in engine_data(cls.name).items():
                assert name in known, f"{data}: {name} is unknown"
                setattr(cls, name, value)

    def supports(self, version: Version, name: str, value: object = None) -> bool:
        """Returns whether this version accepts a flag or a config key (`speculative_config.method`) with `value`."""
        if self.flags:
            return any(flag.name == name and is_within(version, flag.since, flag.until) for flag in self.flags)
        known = published(self.name)
        if known is None or not known.has(name, version):
            return False
        return value is None or not known.words(name) or known.has(f"{name}={value}", version)

    def versions_with(self, name: str, value: object = None) -> str:
        """Returns the versions that accept a flag or config key, as text for messages; "none" without any."""
        ranges = [f"{flag.since} or newer" if flag.until is None else f"before {flag.until}"
                  for flag in self.flags if flag.name == name]  # fmt: skip
        known = published(self.name)
        read = known.versions if known else ()
        return ", ".join(ranges or [each for each in read if self.supports(parse_version(each), name, value)]) or "none"

    def find_installed(self, place: str | None) -> InstalledProgram | None:
        """Returns the program at `place` (its path or folder); without `place` the one in PATH, None if there is none.
        Raises UsageError if `place` has no program."""
        name = place or self.program
        if place and (folder := user_path(place)).is_dir():
            own, python = folder / self.program, folder / "python"
            name = str(python if python.exists() and not own.exists() else own)
        found = shutil.which(str(user_path(name)) if "/" in name else name)
        if found is None:
            if place:
                raise UsageError(f"--program: {place} is not a program", f"give the path of {self.program}")
            return None
        return self._describe(Path(found))

    def _describe(self, program: Path) -> InstalledProgram:
        """Reads the version from the Python distribution beside the program, since `--version` can take 30 s."""
        python = program.with_name("python")
        for distribution in self.distributions:
            pattern = f"lib/python3*/site-packages/{distribution}-*.dist-info"
            for folder in sorted(program.parent.parent.glob(pattern)):
                version = parse_version(folder.name.removeprefix(f"{distribution}-").removesuffix(".dist-info"))
                return InstalledProgram(program, python if python.exists() else None, distribution, version)
        is_elsewhere = bool(self.distributions and self.start_module)  # a Python program
        return InstalledProgram(program, None, None, None if is_elsewhere else _ask_version(program))

    def choose_version(self, named: str | None, installed: InstalledProgram | None) -> tuple[Version, bool]:
        """Returns the engine version to write commands for, and whether it is assumed (neither named nor known)."""
        known = parse_version(named) if named is not None else installed.version if installed else None
        return (known, False) if known else (parse_version(self.newest), True)

    def resolve(self, words: Sequence[str], installed: InstalledProgram | None) -> list[str]:
        """Returns the command with installed paths; a program of another distribution is run as a Python module."""
        if installed is not None and words[0] == "python" and installed.python:
            return [str(installed.python), *words[1:]]
        if installed is None or words[0] != self.program:
            return list(words)
        if self.start_module and installed.python and installed.distribution != self.distributions[0]:
            return [str(installed.python), "-m", self.start_module, "--model", *words[2:]]  # of PROGRAM serve MODEL ...
        return [str(installed.program), *words[1:]]


def _ask_version(program: Path) -> Version | None:
    """Runs `program --version`; None without a usable answer. llama.cpp prints `version: 11434 (abc)`, and `build 0`
    if it was built outside its repository."""
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
    """Returns YAML in block style: literal blocks for multi-line strings, quotes for ambiguous strings."""
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
    """Collects the arguments of one program and checks that its version has them."""

    def __init__(self, program: EngineProgram, version: Version) -> None:
        self.program, self.version = program, version
        self.words: list[str] = []

    def has(self, name: str) -> bool:
        return self.program.supports(self.version, name)

    def require(self, name: str, value: object = None) -> None:
        """Raises UsageError if this version lacks the flag, config key or value."""
        if not self.program.supports(self.version, name, value):
            shown = name.rpartition(".")[2] + (f" {value}" if isinstance(value, str) else "")
            what = f"{self.program.title} {version_text(self.version)} has no {shown}"
            raise UsageError(what, f"versions with it: {self.program.versions_with(name, value)}")

    def add(self, name: str, value: object = None) -> None:
        """Adds a flag with its value; a switch has the value None. Raises UsageError if the version lacks it."""
        self.require(name, value)
        self.words += [name] if value is None else [name, str(value)]

    def add_all(self, flags: Mapping[str, object]) -> None:
        for name, value in flags.items():
            self.add(name, value)

    def add_sizes(self, sizes: Mapping[str, int]) -> None:
        """Adds the flags whose value is above 1; 1 is every engine's default."""
        self.add_all({name: size for name, size in sizes.items() if size > 1})

    def config(self, name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `entries` as a dictionary. Raises UsageError for a key or value that this version lacks."""
        for key, value in entries.items():
            self.require(f"{name}.{key}", value)
        return dict(entries)

    def add_json(self, flag: str, entries: Mapping[str, Any]) -> None:
        """Adds a flag whose value is a JSON config."""
        self.add(flag, json.dumps(self.config(flag.lstrip("-").replace("-", "_"), entries)))


class ServerBuilder(CommandBuilder):
    """Builds the LaunchPlan of one server: arguments, steps, files and notes."""

    program: "EngineLauncher"

    def __init__(self, launcher: "EngineLauncher", facts: ModelFacts, spec: LaunchSpec, version: Version) -> None:
        super().__init__(launcher, version)
        self.facts, self.spec, self.plan = facts, spec, LaunchPlan()

    def note(self, text: str) -> None:
        self.plan.notes.append(text)

    def add_settings(self, settings: Mapping[str, Any]) -> None:
        """Adds the engine's flags for common options (True: a switch). Raises UsageError if the engine has no flag."""
        for name, value in settings.items():
            if value is None or value is False:
                continue
            if (flag := self.program.flag_of(name)) is None:
                what = f"{self.program.title} has no flag for {option_flag(name)}"
                raise UsageError(what, LEAVE_OUT + ", or give its own flag after --")
            for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
                self.add(flag, None if each is True else each)

    def serve(self, *words: str, node: int = 0, where: str = "", answers: bool = True, **environment: str) -> None:
        """Adds a serving step; the user's own arguments come last. `answers`: this step listens on the port."""
        environment = {**self.spec.device_environment, **environment}
        port = self.spec.port if answers else None
        step = LaunchStep((*words, *self.spec.extra), where, environment=environment, node=node, port=port)
        self.plan.serve.append(step)


class EngineLauncher(EngineProgram):
    """An engine that `launch` writes commands for."""

    modules: ClassVar[Sequence[str]] = ()  # words besides `program` that identify a command line of this engine
    images: ClassVar[Mapping[str, str]]
    """Platform -> container image; empty: the engine runs there, but no image is published."""
    alternatives: ClassVar[Mapping[str, str]] = {}  # platform without this engine -> what to use there
    moved_images: ClassVar[Mapping[str, str]] = {}  # former image repository -> today's
    format: ClassVar[str] = ""  # checkpoint format needed for drafting, safetensors or gguf; empty: any
    format_hint: ClassVar[str] = "give safetensors"
    exports: ClassVar[Sequence[str]] = ()  # export targets that write a head for the engine, preferred first
    unsupported: ClassVar[Mapping[str, str]] = {}  # field of LaunchSpec that the engine cannot use -> hint
    has_subcommands: ClassVar[bool] = False  # has commands besides `serve`
    runs_copies: ClassVar[bool] = False
    """--dp starts separate servers behind a router. If false, the engine has data parallelism of its own."""
    pd_router: ClassVar[str] = ""
    """The router (fleet.ROUTERS) for prefill/decode disaggregation; empty: the engine has none."""
    bootstrap_port: ClassVar[int | None] = None
    """Bootstrap port of the first prefill server, for engines whose router needs it."""
    has_cpu_tp: ClassVar[bool] = False  # supports --tp on a CPU
    model_first: ClassVar[bool] = False  # the model follows the program without a flag. (After `serve` it always does.)
    health: ClassVar[str] = "/health"
    settings: ClassVar[Mapping[str, str]] = {}  # common option -> flag
    methods: ClassVar[Mapping[str, str]] = {}  # kind of drafter -> the engine's word for it
    renamed: ClassVar[Mapping[str, str]] = {}  # old flag -> new flag
    removed: ClassVar[Mapping[str, str]] = {}  # old flag -> why it is gone, or what replaces it
    replaced: ClassVar[Mapping[str, Sequence[str]]] = {}  # old switch -> (new flag, its value)
    switches: ClassVar[Sequence[str]] = ()  # flags of `removed` that take no value

    def wrong_format(self, facts: ModelFacts) -> str:
        """Returns why the engine cannot draft with a checkpoint of this format; "" if it can."""
        if self.format == "gguf" and facts.format != "gguf":
            return f"{facts.source} is not a GGUF file"
        if self.format == "safetensors" and facts.format == "gguf":
            return f"{facts.source} is a GGUF file, which {self.title} cannot draft with"
        return ""

    def plan(self, facts: ModelFacts, spec: LaunchSpec, version: Version) -> LaunchPlan:
        """Returns the commands of one server. Raises UsageError for an option that the engine or this version does not
        support."""
        for option, hint in self.unsupported.items():
            if getattr(spec, option):
                raise UsageError(f"{self.title} does not support {option_flag(option)}", hint)
        server = ServerBuilder(self, facts, spec, version)
        self.build(server)
        return server.plan

    def build(self, server: ServerBuilder) -> None:
        """Adds the commands for `server.facts` and `server.spec` to `server.plan`. Raises UsageError."""
        raise NotImplementedError

    def modernize(self, line: CommandLine, version: Version) -> None:
        """Updates an old command line in place, with changes that `renamed` and `removed` cannot express."""

    def modernize_config(self, text: str, version: Version) -> tuple[str, list[str], list[str]]:
        """Updates the text of an old configuration file. Returns (new text, changes, warnings)."""
        return text, [], []

    def arguments_of(self, step: LaunchStep) -> tuple[str, ...]:
        """Returns the words of a serving command after the program, including a positional model."""
        begin = next(place for place, word in enumerate(step.words) if word in (self.program, *self.modules))
        return step.words[begin + 1 :]

    def repositories(self) -> set[str]:
        """Returns the names of this engine's container images, without tags."""
        return {image.rpartition(":")[0] for image in self.images.values() if image} | self.moved_images.keys()

    def check_platform(self, platform: str) -> None:
        if platform not in self.images:
            hint = self.alternatives.get(platform, f"it runs on {', '.join(self.images)}")
            raise UsageError(f"{self.title} does not run on {PLATFORMS.get(platform, platform)}", hint)

    def flag_of(self, option: str) -> str | None:
        """Returns the engine's flag for a common option; None if no version has one."""
        own = option_flag(option)
        return self.settings.get(option, own if any(flag.name == own for flag in self.flags) else None)

    def method_of(self, spec: LaunchSpec) -> str:
        """Returns the engine's name for the drafting method. Raises UsageError for a method that it lacks."""
        if spec.method not in self.methods:
            hint = f"it takes {', '.join(self.methods)}"
            raise UsageError(f"{self.title} cannot draft with a head of kind {spec.method}", hint)
        return self.methods[spec.method]


def launchers() -> dict[str, EngineLauncher]:
    """Returns all launchers by name, those of plug-ins too."""
    return {name: registry.find("launchers", name).LAUNCHER for name in registry.available("launchers")}
