"""What every launcher is made of: a table of flags by version, a command line that takes no other, and the plan.

A launcher's file declares its flags (each with the versions that have it and the file it was read from), which of them
stands for a common option, what is stale, and one method that puts the command together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headstart.errors import UsageError
from headstart.formats.drafters import DrafterKind
from headstart.tools.launch.commands import CommandLine
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.versions import Version, at_least, text_of

PLATFORMS = {
    "cuda": "NVIDIA GPUs",
    "rocm": "AMD GPUs",
    "xpu": "Intel GPUs",
    "npu": "Ascend NPUs",
    "metal": "Apple's GPUs",
    "cpu": "a CPU alone",
}
VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES",
           "xpu": "ZE_AFFINITY_MASK"}  # fmt: skip
"""Variables that say which devices of a node a process sees."""
BOTH_SIDES = "a prefill node drafts nothing, but needs the heads: both sides must have the same caches"
OFFLOAD = "drafting over an offloaded KV cache has corrupted texts in some versions: compare with --depth 0"


@dataclass(frozen=True)
class Flag:
    """An argument, or a key inside a config (`speculative_config.method`). `until`: the first version without it.
    `values`: words that it takes and that are checked with it."""

    name: str
    source: str
    since: str = "0"
    until: str | None = None
    values: tuple[str, ...] = ()

    def serves(self, version: Version) -> bool:
        return at_least(version, self.since) and (self.until is None or not at_least(version, self.until))


def flags_of(source: str, *names: str) -> tuple[Flag, ...]:
    """Arguments of one file that every version has."""
    return tuple(Flag(name, source) for name in names)


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Devices side by side. `gpus` 0: a CPU."""

    gpus: int = 0
    tensor: int = 1
    data: int = 1
    expert: int = 1
    nodes: int = 1
    head_node: str = "HEAD_NODE"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user says and an engine is told as it is. `settings`: common options by name (`Launcher.flag_of`)."""

    head: str | None = None
    depth_by_batch: str | None = None
    role: str | None = None  # prefill, decode
    kv_offload_gb: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    settings: Mapping[str, Any] = field(default_factory=dict)
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one server of several runs. `node` counts machines, `address` is how others reach it, `number` counts
    servers; `devices` of the node are its own, and on a CPU `cpus` of each of its workers (empty: the engine chooses).
    """

    server: str = "server"
    number: int = 0
    node: int = 0
    address: str = "127.0.0.1"
    devices: tuple[int, ...] = ()
    cpus: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Wanted(Asked):
    """What is asked of an engine. `depth` 0: no drafting. `drafter`: what kind `head` is; None: the model's own MTP."""

    depth: int
    parallel: Parallelism = Parallelism()
    drafter: DrafterKind | None = None
    platform: str = "cuda"  # of plan.machine.Device
    place: Place = Place()

    @property
    def method(self) -> str:
        """The kind of drafter in vLLM's words."""
        return self.drafter.method if self.drafter else "mtp"

    @property
    def table(self) -> list[list[int]]:
        """Rows of `depth_by_batch` (from, to, depth): ascending, from 1 on, none deeper than `depth`."""
        rows = sorted(json.loads(self.depth_by_batch)) if self.depth_by_batch else []
        if rows and rows[0][0] > 1:
            rows.insert(0, [1, rows[0][0] - 1, self.depth])
        return [[low, high, min(deep, self.depth)] for low, high, deep in rows]

    @property
    def depth_drafted(self) -> int:
        """Prefill nodes draft nothing: the first token needs none."""
        return 0 if self.role == "prefill" else self.depth

    @property
    def visible(self) -> dict[str, str]:
        """The variable by which a process sees its own devices only; empty: all of the node."""
        if not self.place.devices:
            return {}
        return {VISIBLE[self.platform]: ",".join(map(str, self.place.devices))}


@dataclass(frozen=True)
class Step:
    """One command: where it runs, and its environment. `inside`: with the engine's own programs, which are in its
    container where there is one. Steps of one `server` hold a model together, a `node` each; `role`: prefill, decode,
    router, or empty. `port`: where it answers; None: another step of its server does."""

    words: tuple[str, ...]
    where: str = ""
    inside: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    server: str = "server"
    role: str = ""
    node: int = 0
    port: int | None = None


@dataclass(kw_only=True)
class Plan:
    """Commands to run first, the server's own on each node, files they need, and what a user should know. `facts`: what
    rules have to know beside the command line (`rules.Rule`)."""

    before: list[Step] = field(default_factory=list)
    serve: list[Step] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Program:
    """What is launched, by the arguments that its versions take."""

    name: ClassVar[str]
    title: ClassVar[str]
    program: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]] = ()
    """Python distributions that install it."""
    newest: ClassVar[str]
    """The version assumed where none is installed or named: the newest release the table was checked for."""
    start_module: ClassVar[str] = ""
    """Python module that serves, for installations whose program does not run."""
    flags: ClassVar[tuple[Flag, ...]]

    def as_module(self, words: tuple[str, ...]) -> list[str]:
        """The arguments of `start_module` that do what the program does with `words`."""
        return list(words[1:])


class Arguments:
    """A command line that takes only arguments which the engine has in this version."""

    def __init__(self, launcher: Program, version: Version) -> None:
        self.launcher, self.version = launcher, version
        self.words: list[str] = []

    def check(self, name: str, value: object = None) -> None:
        """Raises UsageError for an argument, or a value of one, that this version does not have."""
        declared = [flag for flag in self.launcher.flags if flag.name == name]
        assert declared, f"{name} is not in the table of {self.launcher.name}"
        serving = [flag for flag in declared if flag.serves(self.version)]
        words = {word for flag in serving for word in flag.values}
        if serving and (not words or value in words):
            return
        shown = name.rpartition(".")[2] + (f" {value}" if serving or isinstance(value, str) else "")
        bounds = [flag for flag in declared if not words or value in flag.values] or declared
        since, until = bounds[-1].since, bounds[-1].until
        need = f"before {until}" if until and at_least(self.version, until) else f"{since} or newer"
        raise UsageError(f"{self.launcher.title} {text_of(self.version)} has no {shown}", f"it takes version {need}")

    def has(self, name: str) -> bool:
        return any(flag.name == name and flag.serves(self.version) for flag in self.launcher.flags)

    def add(self, name: str, value: object = None) -> None:
        """A flag and its value; None: a switch."""
        self.check(name, value)
        self.words += [name] if value is None else [name, str(value)]

    def add_sizes(self, sizes: Mapping[str, int]) -> None:
        """Flags of sizes, of which 1 goes without saying."""
        for name, size in sizes.items():
            if size > 1:
                self.add(name, size)

    def config(self, name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        """A JSON or YAML document whose every key is checked."""
        for key, value in entries.items():
            self.check(f"{name}.{key}", value)
        return dict(entries)

    def document(self, name: str, option: str, entries: Mapping[str, Any]) -> None:
        self.add(option, json.dumps(self.config(name, entries)))


class Launcher(Program):
    """One engine."""

    modules: ClassVar[tuple[str, ...]] = ()
    """Words by which a command line is recognized as this engine's, beside the program."""
    images: ClassVar[Mapping[str, str]]
    """Platform that it runs on -> its container image there; empty: none is published."""
    instead: ClassVar[Mapping[str, str]] = {}
    """Platform that it does not run on -> what does."""
    moved: ClassVar[Mapping[str, str]] = {}
    """Former names of image repositories -> today's."""
    serves_by_name: ClassVar[bool] = False
    """Has the program other commands than `serve`?"""
    copies: ClassVar[bool] = False
    """Are copies side by side (--dp) servers of their own, behind a router? Others divide their data themselves."""
    divided: ClassVar[str] = ""
    """The router (routers.py) that sends a prompt to prefill, then to decode; empty: it cannot run them apart."""
    bootstrap: ClassVar[int | None] = None
    """Where the first prefill server tells decode servers of its caches, if the router has to know that."""
    on_cpus: ClassVar[bool] = False
    """Does it take --tp on a CPU?"""
    model_first: ClassVar[bool] = False
    """Does the model follow the program, without a flag? (After `serve` it does.)"""
    health: ClassVar[str] = "/health"
    settings: ClassVar[Mapping[str, str]] = {}
    """Common option -> flag, where that is not the option's own name."""
    joint: ClassVar[str] = "-"
    """What stands between the words of its flags."""
    methods: ClassVar[Mapping[str, str]] = {}
    """Kind of drafter -> the engine's word for it."""
    renamed: ClassVar[Mapping[str, str]] = {}
    removed: ClassVar[Mapping[str, str]] = {}
    """Stale flags and why they are gone or what does their work."""
    switches: ClassVar[frozenset[str]] = frozenset()
    """Those of `removed` that take no value."""

    def plan(self, facts: Facts, wanted: Wanted, version: Version) -> Plan:
        """The commands for one model. Raises UsageError for what this engine or version cannot do."""
        raise NotImplementedError

    def modernize(self, line: CommandLine, version: Version) -> None:
        """Change an old command line in place, beyond `renamed` and `removed`; `line.changes` says what was done."""

    def words_of(self, step: Step) -> tuple[str, ...]:
        """Those of a serving command that are the engine's arguments, the model in front included."""
        begin = next(place for place, word in enumerate(step.words) if word in (self.program, *self.modules))
        return step.words[begin + 1 :]

    def repositories(self) -> set[str]:
        """Names of its images, without their tags."""
        return {image.rpartition(":")[0] for image in self.images.values() if image} | self.moved.keys()

    def check_platform(self, platform: str) -> None:
        """Raises UsageError for one that the engine does not run on."""
        if platform not in self.images:
            hint = self.instead.get(platform, f"it runs on {', '.join(self.images)}")
            raise UsageError(f"{self.title} does not run on {PLATFORMS.get(platform, platform)}", hint)

    def flag_of(self, option: str) -> str | None:
        """The flag of a common option; None where no version has one."""
        name = self.settings.get(option, f"--{option.replace('_', self.joint)}")
        return name if any(flag.name == name for flag in self.flags) else None

    def apply_settings(self, arguments: Arguments, settings: Mapping[str, Any]) -> None:
        """A value of True is a switch. Raises UsageError, naming the option, for a setting without a flag."""
        for name, value in settings.items():
            if value is None or value is False:
                continue
            if (flag := self.flag_of(name)) is None:
                what = f"{self.title} has nothing for --{name.replace('_', '-')}"
                raise UsageError(what, "leave it out, or give its own flag after --")
            for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
                arguments.add(flag, None if each is True else each)

    def method_of(self, wanted: Wanted) -> str:
        """The engine's word for the kind of drafter. Raises UsageError for one that it does not draft with."""
        if wanted.method not in self.methods:
            hint = f"it takes {', '.join(self.methods)}"
            raise UsageError(f"{self.title} cannot draft with a head of kind {wanted.method}", hint)
        return self.methods[wanted.method]

    def refuse(self, wanted: Wanted, **words: str) -> None:
        """Raises UsageError for each field of `wanted` named here that is set."""
        for name, hint in words.items():
            if getattr(wanted, name):
                raise UsageError(f"{self.title} cannot take --{name.replace('_', '-')}", hint)
