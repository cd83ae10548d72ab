"""`headstart launch`: the exact command that makes another engine draft, or that engine started and checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

from headstart import hub, registry
from headstart.config import EngineConfig
from headstart.core import Progress, Report
from headstart.errors import UsageError
from headstart.formats.drafters import DrafterKind
from headstart.tools.launch.alive import check
from headstart.tools.launch.checked import check_words, definitions_of
from headstart.tools.launch.depth import ChosenDepth, choose_depth
from headstart.tools.launch.detect import Installed, find_installed
from headstart.tools.launch.emit import KINDS, emitted
from headstart.tools.launch.facts import Facts, drafter_of, read_facts
from headstart.tools.launch.fleet import Roles, Site, engines_of, fleet, parse_roles, placed, share
from headstart.tools.launch.kubernetes import RAY_VLLM
from headstart.tools.launch.launcher import Asked, Launcher, Plan, Wanted
from headstart.tools.launch.models import check_model, no_heads
from headstart.tools.launch.parallelism import Devices, Room, divide, named_devices
from headstart.tools.launch.prepared import Prepared
from headstart.tools.launch.published import published
from headstart.tools.launch.report import check_lines, document, lines_of
from headstart.tools.launch.start import Running, start
from headstart.tools.launch.translate import translate_text
from headstart.tools.launch.versions import Version, at_least, parse, text_of
from headstart.tools.launch.watch import Say, Watch


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
    disaggregate: str | None = None
    emit: str | None = None  # a name of emit.KINDS


def launcher_of(engine: str) -> Launcher:
    """Raises UsageError for an engine without a launcher, with what to do instead where it is known."""
    name = engine.lower().replace("-", "_")
    if answer := ELSEWHERE.get(name.replace("_", "").replace(".", "")):
        raise UsageError(f"{engine} has no launcher here", answer)
    launcher: Launcher = registry.find("launchers", name).LAUNCHER
    return launcher


def prepare(options: LaunchOptions) -> Prepared:
    """Look at engine, model and machine, and put the command together. Raises UsageError, ModelError or
    CapacityError."""
    _check_numbers(options)
    launcher = launcher_of(options.engine)
    installed = find_installed(launcher, options.program)
    version, assumed = version_of(launcher, options.engine_version, installed)
    devices = named_devices(options.gpus)
    launcher.check_platform(devices.platform)
    if options.head and hub.is_builtin(options.head):
        options = replace(options, head=str(hub.resolve(options.head)))
    drafter = drafter_of(options.head) if options.head else None
    facts = read_facts(options.model)
    check_model(launcher, version, facts.model_type)
    depth = _depth(launcher, version, options, facts, drafter, devices)
    wanted = Wanted(
        depth=depth.depth,
        drafter=drafter,
        platform=devices.platform,
        **{item.name: getattr(options, item.name) for item in fields(Asked)},
    )
    if wanted.role not in (None, "prefill", "decode"):
        raise UsageError(f"--role is {wanted.role!r}, which is unknown", "choose prefill or decode")
    wanted, plan, notes = _plan(launcher, version, options, facts, wanted, devices)
    _check_twice(launcher, version, plan, options.extra)
    plan.notes = [
        *_newer(launcher, version),
        *notes,
        *_remote_code(launcher, facts, wanted),
        *plan.notes,
        *_check(launcher, version, facts, wanted, plan),
    ]
    return Prepared(launcher, version, assumed, installed, facts, wanted, depth.why, plan)


def _plan(
    launcher: Launcher, version: Version, options: LaunchOptions, facts: Facts, wanted: Wanted, devices: Devices
) -> tuple[Wanted, Plan, list[str]]:
    """The commands of one server, or of several behind a router; and what does not fit."""
    asked = {name: options.settings.get(setting) for name, setting in ROOM.items()}
    context, users = (int(str(asked[name])) if str(asked[name]).isdigit() else None for name in ("context", "users"))
    room = Room(context=context, users=users, kv=asked["kv"])
    site = Site(options.emit or "", options.head_node)
    copies = (options.dp or 1) if launcher.copies else 1
    dp = None if launcher.copies else options.dp
    if options.disaggregate is not None and options.role:
        raise UsageError("--disaggregate and --role are two ways to say it", "give one of them")
    if options.disaggregate is None and copies == 1:
        parallel, notes = divide(facts, devices, nodes=options.nodes, tp=options.tp, dp=dp, room=room)
        if wanted.platform == "cpu" and parallel.tensor > 1 and not launcher.on_cpus:
            raise UsageError(f"{launcher.title} is not given --tp on a CPU here", "vllm takes it; --dp runs copies")
        wanted = placed(replace(wanted, parallel=replace(parallel, head_node=site.first())), site)
        return wanted, launcher.plan(facts, wanted, version), notes
    roles = parse_roles(options.disaggregate) if options.disaggregate is not None else Roles(copies=copies)
    if roles.prefill and copies > 1:
        raise UsageError(f"{launcher.title} takes --disaggregate or --dp", "the former says how many servers there are")
    each, notes = share(facts, devices, len(roles.names), nodes=options.nodes, tp=options.tp, dp=dp, room=room)
    wanted = replace(wanted, parallel=each.parallel)
    return wanted, fleet(launcher, facts, wanted, version, roles, each, site), notes


ROOM = {"context": "max_model_len", "users": "max_num_seqs", "kv": "kv_cache_dtype"}
"""What caches are asked for, and the settings that say it."""
ELSEWHERE = {
    "ollama": "`ollama run MODEL` drafts by itself where its model has heads; llamacpp runs the same files",
    "lmstudio": "switch speculative decoding on in its model settings; llamacpp runs the same files",
    "mlx": "mlx_lm drops MTP heads; MTPLX (`mtplx serve MODEL`) drafts with them on Apple's GPUs",
    "mlxlm": "mlx_lm drops MTP heads; MTPLX (`mtplx serve MODEL`) drafts with them on Apple's GPUs",
    "mtplx": "run `mtplx serve MODEL`; `headstart probe` measures it as any other server",
    "exllama": "exllamav3 drafts with EXL3 heads through TabbyAPI: draft_model in its config.yml",
    "exllamav2": "exllamav3 drafts with EXL3 heads through TabbyAPI: draft_model in its config.yml",
    "exllamav3": "exllamav3 drafts with EXL3 heads through TabbyAPI: draft_model in its config.yml",
    "tabbyapi": "exllamav3 drafts with EXL3 heads through TabbyAPI: draft_model in its config.yml",
    "openvino": "OpenVINO GenAI drafts with MTP heads that `optimum-cli export openvino` keeps; greedy, one request",
    "transformers": "model.generate(use_mtp=True), one request at a time",
    "ikllamacpp": "llamacpp with --program PATH runs its llama-server; its flags differ: see --translate",
    "mistralrs": "`mistralrs serve` has flags of its own; `headstart probe` measures it as any other server",
    "tgi": "text-generation-inference is no longer developed: use vllm or sglang",
    "tensorrtllm": "its name here is trtllm",
    "llamaserver": "its name here is llamacpp",
    "koboldcpp": "llamacpp runs the same files",
}
"""Engines that people ask for -> what to do."""


def _depth(
    launcher: Launcher,
    version: Version,
    options: LaunchOptions,
    facts: Facts,
    drafter: DrafterKind | None,
    devices: Devices,
) -> ChosenDepth:
    """Raises UsageError for heads that this version cannot draft with, unless nothing was asked."""
    why = no_heads(launcher, version, facts.model_type) if drafter is None and facts.modules else ""
    if why and options.depth:
        raise UsageError(f"--depth is {options.depth}, but {why}", "--depth 0, or another version")
    if why:
        return ChosenDepth(0, why)
    return choose_depth(facts, options.depth, drafter, gpus=devices.count)


def _check(launcher: Launcher, version: Version, facts: Facts, wanted: Wanted, plan: Plan) -> list[str]:
    """What the engine takes otherwise than it looks. Raises UsageError for a command that it would refuse."""
    drafter = wanted.drafter
    known = {
        "model.type": facts.model_type,
        "model.modules": facts.modules,
        "device": wanted.platform,
        "head.kind": drafter.kind if drafter else None,
        "head.reduced_vocabulary": drafter.reduced_vocabulary if drafter else None,
        "head.most_drafts": drafter.most_drafts if drafter else None,
        **plan.facts,
    }
    notes: dict[str, None] = {}
    for step in engines_of(plan.serve):
        checked = check_words(launcher, version, launcher.words_of(step), known, positional=2)
        if checked.errors:
            raise UsageError(checked.errors[0], "; ".join(checked.errors[1:]) or "see its --help")
        notes |= dict.fromkeys(checked.notes)
    return list(notes)


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


def _check_twice(launcher: Launcher, version: Version, plan: Plan, extra: tuple[str, ...]) -> None:
    """Raises UsageError for a flag given after -- that the command has already, in any spelling."""
    known = definitions_of(launcher.name, version)

    def flags(words: Iterable[str]) -> list[tuple[str, ...]]:
        given = [word.partition("=")[0] for word in words if re.match("--?[A-Za-z]", word)]
        return [(known.find(flag) if known else ()) or (flag,) for flag in given]

    words = launcher.words_of(plan.serve[0])
    for flag, names in zip([word for word in extra if re.match("--?[A-Za-z]", word)], flags(extra), strict=True):
        if flags(words).count(names) > 1:
            hint = "leave it out, or use launch's own option for it; --depth 0 leaves drafting to your flags"
            raise UsageError(f"{flag.partition('=')[0]} is given after --, but is set already", hint)


def _newer(launcher: Launcher, version: Version) -> list[str]:
    known = published(launcher.name)
    newest = list(known.versions)[-1] if known else ""
    if not newest or at_least(parse(newest), text_of(version)):
        return []
    return [f"the flags of {launcher.title} are known up to {newest}: those of {text_of(version)} may differ"]


def _remote_code(launcher: Launcher, facts: Facts, wanted: Wanted) -> list[str]:
    """Code from a checkpoint runs only if the user says so."""
    flag = launcher.flag_of("trust_remote_code")
    if not facts.remote_code or flag is None or flag in wanted.extra or wanted.settings.get("trust_remote_code"):
        return []
    return [f"the checkpoint brings Python code: if {launcher.title} asks for it and you trust it, add -- {flag}"]


def run(options: LaunchOptions, *, docker: bool = False) -> Report:
    """What would be run, or the file that --emit writes. Raises UsageError, ModelError or CapacityError."""
    kind = options.emit
    if kind is None:
        prepared = prepare(mounted(options) if docker else options)
        data = document(prepared, docker=docker)
        return Report(True, data, lines_of(data))
    if kind not in KINDS:
        raise UsageError(f"--emit is {kind!r}, which is unknown", f"choose {', '.join(KINDS)}")
    if kind == "kuberay" and options.engine_version is None:
        options = replace(options, engine_version=RAY_VLLM)
    prepared = prepare(mounted(options))
    text = emitted(prepared, kind)
    return Report(True, {**document(prepared, docker=False), "emitted": text}, text.splitlines())


def mounted(options: LaunchOptions) -> LaunchOptions:
    """Local files by their absolute paths, which are the same inside a container."""

    def absolute(name: str | None) -> str | None:
        there = name is not None and not hub.is_builtin(name) and Path(name).expanduser().exists()
        return str(Path(str(name)).expanduser().resolve()) if there else name

    return replace(options, model=absolute(options.model), head=absolute(options.head))


@dataclass
class Started:
    """Engines that run, and what they were started with."""

    prepared: Prepared
    running: Running

    def check(self, progress: Progress) -> Report:
        """Wait for them, warm them up and read their metrics; `ok`: all draft, or were told not to. Raises UsageError
        with the reason in its log when one does not start."""
        wanted = self.prepared.wanted
        self.running.wait(progress)
        checked = check(self.running, wanted, progress)
        started = {"log": str(self.running.log), "started_s": round(self.running.started_s, 1), "check": checked}
        data = {**document(self.prepared, docker=False), **started}
        return Report(checked["alive"] or not wanted.depth_drafted, data, [*lines_of(data), *check_lines(data)])

    def stay(self, say: Say) -> None:
        """Until Ctrl-C. What ends of several is started again; raises CheckFailed when that cannot help."""
        Watch(self.running, say).forever()


@contextmanager
def started(options: LaunchOptions) -> Iterator[Started]:
    """The engine as a child process, or several and their router, which end with the context. Raises UsageError for
    what one machine cannot do."""
    prepared = prepare(options)
    steps = prepared.plan.serve
    if prepared.installed is None:
        hint = "--program PATH says where it is; --dry-run needs none"
        raise UsageError(f"{prepared.launcher.program} is not installed here", hint)
    if prepared.plan.before or any(step.node or step.port is None for step in steps):
        raise UsageError("this takes more than one machine, or steps before", "--dry-run prints them all")
    router = steps[-1].words[0] if steps[-1].role == "router" else None
    if router and not Path(prepared.commands()[-1][1][0]).exists():
        raise UsageError(f"{router} is not installed here", f"pip install {router}")
    with start(prepared.launcher, prepared.commands(), prepared.plan.files, prepared.wanted) as running:
        yield Started(prepared, running)


def translate(text: str, engine_version: str | None, program: str | None = None) -> Report:
    """Old command lines for the installed (or named) version, with a line on each change; `ok`: nothing is left that a
    person has to decide."""
    done = translate_text(text, engine_version, program)
    (engine, version), *_ = [*done.engines.items(), (None, None)]
    data = {
        "engine": engine,
        "version": text_of(version) if version else None,
        "version_assumed": done.assumed,
        "command": done.text,
        "changes": done.changes,
        "warnings": done.warnings,
    }
    lines = [done.text, *(f"# {change}" for change in done.changes or ["nothing to change"])]
    return Report(not done.warnings, data, [*lines, *(f"# WARNING: {warning}" for warning in done.warnings)])
