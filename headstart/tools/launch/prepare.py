"""Preparation of a launch: reads engine, model and machine, then plans and checks the commands."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from headstart import hub, registry
from headstart.config import EngineConfig
from headstart.errors import UsageError
from headstart.files import user_path
from headstart.tools.launch import arguments, fleet
from headstart.tools.launch.launcher import EngineLauncher, InstalledProgram, launchers, other_engine_hint
from headstart.tools.launch.model_facts import ModelFacts, choose_depth, drafter_of, read_facts
from headstart.tools.launch.parallelism import CacheRequest, Hardware, NodeDevices, divide, named_devices
from headstart.tools.launch.shipped import export_advice
from headstart.tools.launch.spec import LaunchPlan, LaunchRequest, LaunchSpec, LaunchStep, option_flag
from headstart.tools.options import LaunchFlags
from headstart.wording import LEAVE_OUT


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(LaunchFlags, LaunchRequest):
    """Options of `headstart launch`; None: the program decides."""

    engine: str

    def __post_init__(self) -> None:
        EngineConfig(depth_by_batch=self.depth_by_batch)
        lowest = {"nodes": 1, "tp": 1, "dp": 1, "kv_offload_gb": 1, "depth": 0, "port": 1}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise UsageError(f"{option_flag(name)} is {value}, but must be at least {low}")
        if self.role not in (None, "prefill", "decode"):
            raise UsageError(f"--role is {self.role!r}, which is unknown", "choose prefill or decode")
        if self.disaggregate is not None and self.role:
            raise UsageError("--disaggregate and --role cannot go together", "give one of them")


@dataclass
class PreparedLaunch:
    launcher: EngineLauncher
    version: arguments.Version
    assumed: bool  # no version was named or installed
    installed: InstalledProgram | None
    facts: ModelFacts
    spec: LaunchSpec  # of each server
    why_depth: str
    plan: LaunchPlan

    def commands(self) -> list[tuple[LaunchStep, list[str]]]:
        """Returns each serving step with its words, in which programs have their installed paths; the router last."""
        return [
            (step, [fleet.router_of(step).installed_path() or step.words[0], *step.words[1:]] if step.role == "router"
                   else self.launcher.resolve(step.words, self.installed))
            for step in self.plan.serve
        ]  # fmt: skip


def launcher_of(engine: str) -> EngineLauncher:
    """Returns the launcher of an engine, or of a plug-in's. Raises UsageError for an engine without a launcher."""
    if hint := other_engine_hint(engine):
        raise UsageError(f"{engine} has no launcher here", hint)
    name = engine.lower().replace("-", "_")
    if not registry.is_available("launchers", name):  # a title, such as llama.cpp or TensorRT-LLM
        name = next((each for each, own in launchers().items() if _letters(own.title) == _letters(engine)), name)
    launcher: EngineLauncher = registry.find("launchers", name).LAUNCHER
    return launcher


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def prepare(options: LaunchOptions) -> PreparedLaunch:
    """Plans all commands and checks them. Raises UsageError, ModelError or CapacityError for an impossible launch."""
    launcher = launcher_of(options.engine)
    installed = launcher.find_installed(options.program)
    version, assumed = launcher.choose_version(options.engine_version, installed)
    devices = named_devices(options.gpus)
    launcher.check_platform(devices.platform)
    if options.head and hub.is_builtin(options.head):
        options = replace(options, head=str(hub.resolve(options.head)))
    facts = read_facts(options.model)
    if facts.revision:
        options = replace(options, settings={**options.settings, "revision": facts.revision})
    advise = partial(export_advice, launcher, facts, options.model, options.head)
    drafter = drafter_of(options.head, advise) if options.head else facts.drafter
    if why := launcher.wrong_format(facts):
        raise UsageError(why, advise() or launcher.format_hint)
    arguments.check_model(launcher, version, facts.model_type)
    own = not options.head and facts.modules
    why_none = arguments.why_no_heads(launcher, version, facts.model_type) if own else ""
    if why_none and options.depth:
        raise UsageError(f"--depth is {options.depth}, but {why_none}", "--depth 0, or another version")
    depth, why_depth = (
        (0, why_none) if why_none else choose_depth(facts, options.depth, drafter, gpus=devices.count, advise=advise)
    )
    request = {item.name: getattr(options, item.name) for item in fields(LaunchRequest)}
    spec = LaunchSpec(depth=depth, drafter=drafter, platform=devices.platform, **request)
    spec, plan, notes = _plan(launcher, version, options, facts, spec, devices)
    _check_repeated(launcher, version, plan.serve[0], options.extra)
    known, flag = arguments.published(launcher.name), launcher.flag_of("trust_remote_code")
    if known and not arguments.at_least(arguments.parse_version(known.versions[-1]), arguments.version_text(version)):
        newest = f"the flags of {launcher.title} are known up to {known.versions[-1]}"
        notes.insert(0, f"{newest}: those of {arguments.version_text(version)} may differ")
    if drafter is None and not facts.modules and options.depth is None and (advice := advise(reasons=True)):
        notes.append(advice)
    if facts.remote_code and flag and flag not in spec.extra and not spec.settings.get("trust_remote_code"):
        asked = f"if {launcher.title} asks for it and you trust it, add -- {flag}"
        notes.append(f"the checkpoint brings Python code: {asked}")
    plan.notes = [*notes, *plan.notes, *check_plan(launcher, version, facts, spec, plan)]
    return PreparedLaunch(launcher, version, assumed, installed, facts, spec, why_depth, plan)


def _plan(
    launcher: EngineLauncher, version: arguments.Version, options: LaunchOptions, facts: ModelFacts, spec: LaunchSpec,
    devices: NodeDevices,
) -> tuple[LaunchSpec, LaunchPlan, list[str]]:  # fmt: skip
    """Plans one server, or several behind a router. Returns the completed spec, the plan and notes about memory."""
    context, users = (
        int(str(value)) if str(value := options.settings.get(name)).isdecimal() else None
        for name in ("max_model_len", "max_num_seqs")
    )
    cache = CacheRequest(context=context, users=users, kv=options.settings.get("kv_cache_dtype"))
    num_copies = (options.dp or 1) if launcher.runs_copies else 1
    dp = None if launcher.runs_copies else options.dp
    hardware = Hardware(devices=devices, nodes=options.nodes, tp=options.tp, dp=dp, cache=cache)
    target = fleet.LaunchTarget(options.emit or "", options.head_node)
    if options.disaggregate is None and num_copies == 1:
        parallel, notes = divide(facts, hardware)
        if spec.platform == "cpu" and parallel.tensor > 1 and not launcher.has_cpu_tp:
            raise UsageError(f"{launcher.title} has no --tp on a CPU here", "vllm has it; --dp runs copies")
        spec = fleet.place_single(replace(spec, parallel=parallel), target)
        return spec, launcher.plan(facts, spec, version), notes
    roles = ("",) * num_copies if options.disaggregate is None else fleet.parse_roles(options.disaggregate)
    if any(roles) and num_copies > 1:
        raise UsageError(f"{launcher.title} takes --disaggregate or --dp", "--disaggregate sets the number of servers")
    share, notes = fleet.share_devices(facts, hardware, len(roles))
    spec = replace(spec, parallel=share.parallel)
    return spec, fleet.plan_servers(launcher, facts, spec, version, roles, share, target), notes


def check_plan(
    launcher: EngineLauncher, version: arguments.Version, facts: ModelFacts, spec: LaunchSpec, plan: LaunchPlan
) -> list[str]:
    """Returns notes on arguments that the engine silently changes. Raises UsageError for a refused command."""
    known = {"model.type": facts.model_type, "model.modules": facts.modules, "device": spec.platform, **plan.facts}
    for name in ("kind", "reduced_vocabulary", "max_drafts"):
        known[f"head.{name}"] = getattr(spec.drafter, name, None)
    notes: dict[str, None] = {}
    for step in plan.engines:
        check = arguments.check_arguments(launcher, version, launcher.arguments_of(step), known, num_positional=2)
        if check.errors:
            raise UsageError(check.errors[0], "; ".join(check.errors[1:]) or "see its --help")
        notes |= dict.fromkeys(check.notes)
    return list(notes)


def _check_repeated(
    launcher: EngineLauncher, version: arguments.Version, step: LaunchStep, extra: Sequence[str]
) -> None:
    """Raises UsageError for a flag after -- that the command already has, in any spelling."""
    table = arguments.table_for(launcher.name, version)

    def names(words: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
        flags = [word.partition("=")[0] for word in words if re.match("--?[A-Za-z]", word)]
        return [(flag, (table.find(flag) if table else ()) or (flag,)) for flag in flags]

    given = [name for _, name in names(launcher.arguments_of(step))]
    for flag, name in names(extra):
        if given.count(name) > 1:
            hint = LEAVE_OUT + ", or use launch's own option for it; --depth 0 leaves drafting to your flags"
            raise UsageError(f"{flag} is given after --, but is set already", hint)


def with_absolute_paths(options: LaunchOptions) -> LaunchOptions:
    """Returns the options with absolute paths of local files: containers mount them at the same path."""

    def absolute(name: str | None) -> str | None:
        there = name is not None and not hub.is_builtin(name) and user_path(name).exists()
        return str(user_path(str(name)).resolve()) if there else name

    return replace(options, model=absolute(options.model), head=absolute(options.head))
