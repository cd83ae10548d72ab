"""`headstart launch`: the exact command that makes another engine draft, or that engine started and checked."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from headstart import registry
from headstart.config import EngineConfig
from headstart.core import Progress, Report
from headstart.errors import UsageError
from headstart.tools.launch.depth import choose_depth
from headstart.tools.launch.detect import Installed, command, find_installed
from headstart.tools.launch.facts import Facts, method_of, read_facts
from headstart.tools.launch.launcher import Asked, Launcher, Plan, Step, Wanted
from headstart.tools.launch.parallelism import divide, named_devices
from headstart.tools.launch.published import published
from headstart.tools.launch.start import Running, check, start
from headstart.tools.launch.translate import modernize, read_line
from headstart.tools.launch.versions import Version, parse, text_of


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(Asked):
    """What to launch and where; None lets the program decide."""

    engine: str
    model: str | None = None
    engine_version: str | None = None
    program: str | None = None
    depth: int | None = None
    gpus: str | None = None
    tp: int | None = None
    dp: int | None = None
    nodes: int = 1
    head_node: str = "HEAD_NODE"


@dataclass
class Prepared:
    """A plan with what it was made from."""

    launcher: Launcher
    version: Version
    assumed: bool  # nothing was installed or named
    installed: Installed | None
    facts: Facts
    wanted: Wanted
    why_depth: str
    plan: Plan

    def commands(self) -> list[tuple[Step, list[str]]]:
        """The servers' commands with the programs that are really there."""
        return [(step, command(self.launcher, step.words, self.installed)) for step in self.plan.serve]


def launcher_of(engine: str) -> Launcher:
    """Raises UsageError for an engine without a launcher."""
    launcher: Launcher = registry.find("launchers", engine).LAUNCHER
    return launcher


def prepare(options: LaunchOptions) -> Prepared:
    """Look at engine, model and machine, and put the command together. Raises UsageError, ModelError or
    CapacityError."""
    _check_numbers(options)
    launcher = launcher_of(options.engine)
    installed = find_installed(launcher, options.program)
    version, assumed = version_of(launcher, options.engine_version, installed)
    facts = read_facts(options.model)
    devices = named_devices(options.gpus)
    depth = choose_depth(facts, options.depth, gpus=devices.count, separate=options.head is not None)
    parallel, notes = divide(facts, devices, nodes=options.nodes, tp=options.tp, dp=options.dp)
    wanted = Wanted(
        depth=depth.depth,
        parallel=replace(parallel, head_node=options.head_node),
        method=method_of(options.head) if options.head else "mtp",
        **{item.name: getattr(options, item.name) for item in fields(Asked)},
    )
    _check_wanted(facts, wanted)
    _check_extra(launcher, version, options.extra)
    plan = launcher.plan(facts, wanted, version)
    _check_twice(plan, options.extra)
    plan.notes = [*notes, *_remote_code(launcher, facts, wanted), *plan.notes]
    return Prepared(launcher, version, assumed, installed, facts, wanted, depth.why, plan)


def version_of(launcher: Launcher, named: str | None, installed: Installed | None) -> tuple[Version, bool]:
    """The version to write for, and whether it is only assumed."""
    if named is not None:
        return parse(named), False
    if installed is not None and installed.version is not None:
        return installed.version, False
    return parse(launcher.newest), True


def _check_numbers(options: LaunchOptions) -> None:
    """Raises UsageError for a value out of range."""
    EngineConfig(depth_by_batch=options.depth_by_batch)
    low = {"nodes": 1, "tp": 1, "dp": 1, "kv_offload_gb": 1, "depth": 0, "port": 1}
    for name, least in low.items():
        value = getattr(options, name)
        if value is not None and value < least:
            flag = f"--{name.removesuffix('_gb').replace('_', '-')}"
            raise UsageError(f"{flag} is {value}, but must be at least {least}")


def _check_wanted(facts: Facts, wanted: Wanted) -> None:
    if wanted.role not in (None, "prefill", "decode"):
        raise UsageError(f"--role is {wanted.role!r}, which is unknown", "choose prefill or decode")
    if wanted.head and facts.modules and wanted.method != "mtp":
        hint = "engines draft with one of them: leave --head out, or launch a model without its head"
        raise UsageError(f"{facts.source} has an MTP head of its own, and --head is another drafter", hint)


def _check_extra(launcher: Launcher, version: Version, extra: tuple[str, ...]) -> None:
    """Flags given after -- exist in this version, as far as is known."""
    known = published(launcher.name)
    for word in extra:
        flag = word.partition("=")[0]
        if known is None or not flag.startswith("--") or known.has(flag, version):
            continue
        like = known.like(flag, version)
        hint = f"did you mean {like}?" if like else "see its --help"
        raise UsageError(f"{launcher.title} {known.nearest(version)} has no {flag}", hint)


def _check_twice(plan: Plan, extra: tuple[str, ...]) -> None:
    """Raises UsageError for a flag given after -- that the command has already."""
    words = plan.serve[0].words
    for flag in (word.partition("=")[0] for word in extra if word.startswith("--")):
        if sum(word.partition("=")[0] == flag for word in words) > 1:
            hint = "leave it out, or use launch's own option for it; --depth 0 leaves drafting to your flags"
            raise UsageError(f"{flag} is given after --, but is set already", hint)


def _remote_code(launcher: Launcher, facts: Facts, wanted: Wanted) -> list[str]:
    """Code from a checkpoint runs only if the user says so."""
    flag = launcher.flag_of("trust_remote_code")
    if not facts.remote_code or flag is None or flag in wanted.extra or wanted.settings.get("trust_remote_code"):
        return []
    return [f"the checkpoint brings Python code: if {launcher.title} asks for it and you trust it, add -- {flag}"]


def run(options: LaunchOptions, *, docker: bool = False) -> Report:
    """What would be run. Raises UsageError, ModelError or CapacityError."""
    prepared = prepare(options)
    data = document(prepared, docker=docker)
    return Report(True, data, _lines(data))


@dataclass
class Started:
    """An engine that runs, and what it was started with."""

    prepared: Prepared
    running: Running

    def check(self, progress: Progress) -> Report:
        """Wait for it, warm it up and read its metrics; `ok`: it drafts, or was told not to. Raises UsageError with the
        reason in its log when it does not start."""
        wanted = self.prepared.wanted
        self.running.wait(progress)
        checked = check(self.running, wanted, progress)
        started = {"log": str(self.running.log), "started_s": round(self.running.started_s, 1), "check": checked}
        data = {**document(self.prepared, docker=False), **started}
        return Report(checked["alive"] or not wanted.depth_drafted, data, [*_lines(data), *_check_lines(data)])

    def stay(self) -> None:
        """Until it ends, which is an error, or Ctrl-C."""
        code = self.running.process.wait()
        raise self.running.failed(f"the engine has ended with code {code}")


@contextmanager
def started(options: LaunchOptions) -> Iterator[Started]:
    """The engine as a child process, which ends with the context. Raises UsageError for what one process cannot do."""
    prepared = prepare(options)
    if prepared.installed is None:
        hint = "--program PATH says where it is; --dry-run needs none"
        raise UsageError(f"{prepared.launcher.program} is not installed here", hint)
    if prepared.plan.before or len(prepared.plan.serve) > 1:
        raise UsageError("this takes more than one command", "--dry-run prints them all")
    with start(prepared.launcher, *prepared.commands()[0], prepared.plan.files, prepared.wanted) as running:
        yield Started(prepared, running)


def translate(text: str, engine_version: str | None, program: str | None = None) -> Report:
    """An old command line for the installed (or named) version, with a line on each change."""
    line, launcher = read_line(text)
    installed = find_installed(launcher, program)
    version, assumed = version_of(launcher, engine_version, installed)
    modernize(line, launcher, version)
    data = {
        "engine": launcher.name,
        "version": text_of(version),
        "version_assumed": assumed,
        "command": line.text(),
        "changes": line.changes,
        "warnings": line.warnings,
    }
    lines = [line.text(), *(f"# {change}" for change in line.changes or ["nothing to change"])]
    return Report(not line.warnings, data, [*lines, *(f"# WARNING: {warning}" for warning in line.warnings)])


def document(prepared: Prepared, *, docker: bool) -> dict[str, Any]:
    plan, wanted, facts = prepared.plan, prepared.wanted, prepared.facts
    commands = [
        {"where": step.where, "command": _docker(prepared, step) if docker else _shell(step.environment, words)}
        for step, words in prepared.commands()
    ]
    return {
        "engine": prepared.launcher.name,
        "version": text_of(prepared.version),
        "version_assumed": prepared.assumed,
        "model": {"source": facts.source, "type": facts.model_type, "modules": facts.modules,
                  "weight_bytes": facts.weight_bytes, "attention_heads": facts.attention_heads},
        "depth": wanted.depth_drafted,
        "why_depth": prepared.why_depth,
        "layout": {name: value for name, value in vars(wanted.parallel).items() if name != "head_node"},
        "before": [{"where": step.where, "command": _shell(step.environment, step.words)} for step in plan.before],
        "serve": commands,
        "files": plan.files,
        "notes": plan.notes,
    }  # fmt: skip


def _shell(environment: Mapping[str, str], words: list[str] | tuple[str, ...]) -> str:
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(words)])


def _docker(prepared: Prepared, step: Step) -> str:
    """The same in the engine's own image: model and files mounted, the program as entry point."""
    launcher, source = prepared.launcher, prepared.facts.source
    words = ["docker", "run", "--rm", "--ipc=host"]
    several = len(prepared.plan.serve) > 1 or prepared.wanted.parallel.nodes > 1
    words += ["--network=host"] if several else ["-p", f"{prepared.wanted.port}:{prepared.wanted.port}"]
    words += launcher.device.split() if prepared.wanted.parallel.gpus else []
    for name, value in step.environment.items():
        words += ["-e", f"{name}={value}"]
    local = {word: str(Path(word).resolve()) for word in (source, prepared.wanted.head) if word and Path(word).exists()}
    for place in local.values():
        words += ["-v", f"{place}:{place}:ro"]
    if source not in local:
        words += ["-v", "hf-cache:/root/.cache/huggingface"]
    for name in prepared.plan.files:
        words += ["-v", f"./{name}:/config/{name}:ro"]
    inside = [f"/config/{word}" if word in prepared.plan.files else word for word in step.words]
    inside = [local.get(word, word) for word in inside]
    inside = ["0.0.0.0" if word == prepared.wanted.host else word for word in inside]
    image = launcher.image.format(version=text_of(prepared.version))
    return shlex.join([*words, "--entrypoint", inside[0], image, *inside[1:]])


def _lines(data: dict[str, Any]) -> list[str]:
    model, assumed = data["model"], " (assumed)" if data["version_assumed"] else ""
    lines = [
        f"# {data['engine']} {data['version']}{assumed}; {model['type']}, MTP modules: {model['modules']}",
        f"# depth {data['depth']}: {data['why_depth']}",
    ]
    lines += [f"# note: {note}" for note in data["notes"]]
    for name, text in data["files"].items():
        lines += [f"cat > {name} <<'EOF'", *text.splitlines(), "EOF"]
    for each in (*data["before"], *data["serve"]):
        lines += [f"# {each['where']}:"] if each["where"] else []
        lines.append(each["command"])
    return lines


def _check_lines(data: dict[str, Any]) -> list[str]:
    checked, length = data["check"], data["check"]["acceptance_length"]
    if checked["alive"]:  # by flags of the user's own too
        said = f"drafting is alive: acceptance length {length:.2f}" if length else "drafting is alive"
    elif not data["depth"]:
        said = f"plain decoding: {data['why_depth']}"
    else:
        said = f"DRAFTING IS NOT ALIVE: {checked['why']}"
    return [f"# answered after {data['started_s']} s; log {data['log']}", f"# {said}"]
