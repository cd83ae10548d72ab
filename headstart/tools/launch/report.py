"""What `launch` says: the plan, and what its check found."""

from __future__ import annotations

from typing import Any

from headstart.tools.launch.containers import containers, shell
from headstart.tools.launch.prepared import Prepared
from headstart.tools.launch.versions import text_of


def document(prepared: Prepared, *, docker: bool) -> dict[str, Any]:
    plan, wanted, facts = prepared.plan, prepared.wanted, prepared.facts
    commands = [{"where": step.where, "command": shell(step.environment, words)} for step, words in prepared.commands()]
    before = [{"where": step.where, "command": shell(step.environment, step.words)} for step in plan.before]
    if docker:
        before, commands = containers(prepared.launcher, prepared.version, facts, wanted, plan)
    return {
        "engine": prepared.launcher.name,
        "version": text_of(prepared.version),
        "version_assumed": prepared.assumed,
        "model": {"source": facts.source, "type": facts.model_type, "modules": facts.modules,
                  "weight_bytes": facts.weight_bytes, "attention_heads": facts.attention_heads},
        "depth": wanted.depth_drafted,
        "why_depth": "a prefill node drafts nothing" if wanted.depth > wanted.depth_drafted else prepared.why_depth,
        "layout": {name: value for name, value in vars(wanted.parallel).items() if name != "head_node"},
        "before": before,
        "serve": commands,
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
    checked, length = data["check"], data["check"]["acceptance_length"]
    if checked["alive"]:  # by flags of the user's own too
        said = f"drafting is alive: acceptance length {length:.2f}" if length else "drafting is alive"
    elif not data["depth"]:
        said = f"plain decoding: {data['why_depth']}"
    else:
        said = f"DRAFTING IS NOT ALIVE: {checked['why']}"
    advice = [f"# even of text that is easy to guess: {checked['advice']}"] if checked.get("advice") else []
    return [f"# answered after {data['started_s']} s; log {data['log']}", f"# {said}", *advice]
