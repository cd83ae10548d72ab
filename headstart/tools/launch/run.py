"""`headstart launch`: writes the command that makes another engine draft, or starts the engine and checks it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart.core import Progress, Report
from headstart.errors import UsageError
from headstart.tools.engine_metrics import EngineCounters, advise
from headstart.tools.launch.arguments import version_text
from headstart.tools.launch.containers import KINDS, RAY_VLLM, container_commands, documents, emit, shell_line
from headstart.tools.launch.prepare import LaunchOptions, PreparedLaunch, prepare, with_absolute_paths
from headstart.tools.launch.processes import ServerGroup, start
from headstart.tools.launch.spec import LaunchSpec
from headstart.tools.probe.endpoint import Endpoint
from headstart.tools.probe.run import PREDICTABLE


def run(options: LaunchOptions, *, docker: bool = False) -> Report:
    """Returns the commands of a launch without running them, or the text of --emit's file. Raises UsageError,
    ModelError or CapacityError for an impossible launch."""
    kind = options.emit
    if kind is None:
        data = document(prepare(with_absolute_paths(options) if docker else options), docker=docker)
        return Report(True, data, lines_of(data))
    if kind not in KINDS:
        raise UsageError(f"--emit is {kind!r}, which is unknown", f"choose {', '.join(KINDS)}")
    if kind == "kuberay" and options.engine_version is None:
        options = replace(options, engine_version=RAY_VLLM)
    prepared = prepare(with_absolute_paths(options))
    text = emit(prepared, kind)
    return Report(True, {**document(prepared, docker=False), "emitted": text}, text.splitlines())


def document(prepared: PreparedLaunch, *, docker: bool) -> dict[str, Any]:
    """Returns the JSON document of a launch; with `docker` its commands are `docker run` lines."""
    plan, spec, facts = prepared.plan, prepared.spec, prepared.facts
    before = ((step, shell_line(step.environment, step.words)) for step in plan.before)
    serve = ((step, shell_line(step.environment, words)) for step, words in prepared.commands())
    return {
        "engine": prepared.launcher.name,
        "version": version_text(prepared.version),
        "version_assumed": prepared.assumed,
        "model": {"source": facts.source, "type": facts.model_type, "modules": facts.modules,
                  "weight_bytes": facts.weight_bytes, "attention_heads": facts.attention_heads},
        "depth": spec.depth_drafted,
        "why_depth": "a prefill node drafts nothing" if spec.depth > spec.depth_drafted else prepared.why_depth,
        "layout": {name: value for name, value in vars(spec.parallel).items() if name != "head_node"},
        **(container_commands(prepared) if docker else {"before": documents(before), "serve": documents(serve)}),
        "files": plan.files,
        "notes": plan.notes,
    }  # fmt: skip


def lines_of(data: dict[str, Any]) -> list[str]:
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


def check_lines(data: dict[str, Any]) -> list[str]:
    check, length = data["check"], data["check"]["acceptance_length"]
    if check["alive"]:  # even with --depth 0: the user's own flags may switch drafting on
        verdict = f"drafting is alive: acceptance length {length:.2f}" if length else "drafting is alive"
    elif not data["depth"]:
        verdict = f"plain decoding: {data['why_depth']}"
    else:
        verdict = f"DRAFTING IS NOT ALIVE: {check['why']}"
    advice = [f"# although the warm-up text is easy to predict: {check['advice']}"] if check.get("advice") else []
    return [f"# answered after {data['started_s']} s; log {data['log']}", f"# {verdict}", *advice]


@dataclass
class RunningLaunch:
    prepared: PreparedLaunch
    servers: ServerGroup

    def check(self, progress: Progress) -> Report:
        """Waits for the engines, warms them up and reads their metrics. `ok`: every engine drafts, or none should.
        Raises UsageError, with the last error of the log, if an engine does not start."""
        spec = self.prepared.spec
        self.servers.wait(progress)
        check = check_drafting(self.servers, spec, progress)
        started = {"log": str(self.servers.log), "started_s": round(self.servers.started_s, 1), "check": check}
        data = {**document(self.prepared, docker=False), **started}
        return Report(check["alive"] or not spec.depth_drafted, data, [*lines_of(data), *check_lines(data)])


@contextmanager
def started(options: LaunchOptions) -> Iterator[RunningLaunch]:
    """Runs engines and their router as child processes, which end with the context. Raises UsageError for a program
    that is not installed, or a plan with several machines or preparing steps."""
    prepared = prepare(options)
    steps = prepared.plan.serve
    if prepared.installed is None:
        hint = "install it, or name its path with --program; --dry-run prints the command without it"
        raise UsageError(f"{prepared.launcher.program} is not installed here", hint)
    if prepared.plan.before or any(step.node or step.port is None for step in steps):
        raise UsageError("this takes more than one machine, or steps before", "--dry-run prints them all")
    router = steps[-1].words[0] if steps[-1].role == "router" else None
    if router and not Path(prepared.commands()[-1][1][0]).exists():
        raise UsageError(f"{router} is not installed here", f"pip install {router}")
    with start(prepared.launcher, prepared.commands(), prepared.plan.files, prepared.spec) as servers:
        yield RunningLaunch(prepared, servers)


WARMUP_TOKENS = 64
MIN_DRAFTS = 10  # drafts needed for advice; the warm-up's text is easy to predict
METRICS_READS, METRICS_POLL_S = 10, 0.3  # some engines update counters late: metrics are read until they change


def check_drafting(servers: ServerGroup, spec: LaunchSpec, progress: Progress) -> dict[str, Any]:
    """Sends warm-up prompts and returns the engines' drafting meanwhile (`draft_summary`). With several drafting
    engines, `servers` has the summary of each."""
    front = Endpoint(servers.front.server)
    drafting = [each for each in servers.engines if each.step.role != "prefill"]
    is_divided = len(drafting) < len(servers.engines)
    backends = [Endpoint(each.server, front.model) for each in drafting]
    before = [each.metrics() for each in backends]
    endpoints, tokens = [front] if is_divided else backends, 0
    for number, endpoint in enumerate(endpoints):
        for done, prompt in enumerate(PREDICTABLE):
            progress(number * len(PREDICTABLE) + done, len(endpoints) * len(PREDICTABLE), "warming up")
            tokens += endpoint.stream("predictable", prompt, WARMUP_TOKENS, 0.0).tokens or 0
    if len(servers.processes) > 1 and not is_divided:  # also test the path through the router
        front.stream("predictable", PREDICTABLE[0], WARMUP_TOKENS, 0.0)
    counted = []
    for endpoint, then in zip(backends, before, strict=True):
        now = endpoint.metrics()
        for _ in range(METRICS_READS if spec.depth_drafted else 0):
            if now is None or (now.is_drafting if then is None else now != then):
                break
            time.sleep(METRICS_POLL_S)
            now = endpoint.metrics()
        counted.append(now.since(then) if now and then else now)
    found = draft_summary(EngineCounters.total(counted), tokens)
    if len(drafting) > 1:
        by_name = {each.name: draft_summary(counts, None) for each, counts in zip(drafting, counted, strict=True)}
        dead = [name for name, summary in by_name.items() if not summary["alive"]]
        found |= {"servers": by_name, "alive": not dead}
        if dead and not found["why"]:
            found["why"] = f"the metrics of {', '.join(dead)} count no accepted drafts"
    return found


def draft_summary(counts: EngineCounters | None, tokens: int | None) -> dict[str, Any]:
    """Returns the JSON summary of one engine's counters. `counts` is None for an engine without known metrics."""
    if counts is None:
        why = "it has no known drafting metrics"
        return {"alive": False, "acceptance_length": None, "tokens": tokens, "why": why}
    length = counts.acceptance_length
    return {
        "alive": counts.is_drafting and (length is None or length > 1.0), "acceptance_length": length, "tokens": tokens,
        "drafts": counts.drafts, "drafted": counts.drafted, "accepted": counts.accepted,
        "per_position": counts.per_position, "advice": advise(counts, MIN_DRAFTS),
        "why": "" if counts.is_drafting else "its metrics count no drafts",
    }  # fmt: skip
