"""Heads in headstart's own layout, trained or in this package, that an export makes usable in another engine."""

import shlex
from contextlib import suppress
from pathlib import Path

from headstart import hub, registry
from headstart.errors import ModelError
from headstart.files import user_path
from headstart.models.shipped_heads import shipped_heads_at
from headstart.tools.export.plan import Plan
from headstart.tools.export.source import Export, ExportRequest
from headstart.tools.launch.launcher import EngineLauncher
from headstart.tools.launch.model_facts import ModelFacts


def export_advice(launcher: EngineLauncher, facts: ModelFacts, model: str | None, head: str | None = None) -> str:
    """Returns the commands that make `head`, or a head in this package for the model, usable in the engine; "" if there
    are none. For a Hub repo, whose tensors are not here, only the export targets for `head`. model: its name as the
    user gave it."""
    if not facts.local:
        targets = " or ".join(launcher.exports)
        return f"by its kind: headstart export --to {targets}" if head and targets else ""
    own = Path(head) if head else None
    heads = [own] if own else shipped_heads_at(hub.resolve(model)).values()
    requests = [(target, ExportRequest(model, each)) for each in heads for target in launcher.exports]
    plans = [(target, request, plan) for target, request in requests if (plan := _plan(target, request))]
    is_usable = not launcher.wrong_format(facts)  # beside a head
    plans.sort(key=lambda each: not (is_usable or each[2].is_model))
    if not plans:
        return ""
    target, request, plan = plans[0]
    name = user_path(str(request.head)).name
    out, given = f"{name}-{target}", ["--head", str(own)] if own else []
    export = ["headstart", "export", request.name, *given, "--to", target, "--out", out]
    written, trunk = "/".join([out, *plan.writers]), request.name if is_usable else "MODEL"
    launch = ["headstart", "launch", launcher.name, *([written] if plan.is_model else [trunk, "--head", written])]
    if any(file.endswith(".py") for file in plan.texts) and (flag := launcher.flag_of("trust_remote_code")):
        launch += ["--", flag]
    needed = "" if is_usable or plan.is_model else ", with MODEL the same model as safetensors"
    found = "" if own else f"headstart has the head {name} for it: "
    return f"{found}{shlex.join(export)}, then {shlex.join(launch)}{needed}"


def _plan(target: str, request: ExportRequest) -> Plan | None:
    """Returns the plan of an export; None for a head that the layout has no place for."""
    export: Export = registry.find("exports", target).EXPORT
    with suppress(ModelError):
        return export(request)
    return None
