"""Heads in headstart's own layout, trained or in this package, that an export makes usable in another engine."""

import shlex
from pathlib import Path

from headstart import hub, registry
from headstart.errors import ModelError
from headstart.files import user_path
from headstart.models.shipped_heads import shipped_heads_at
from headstart.tools.export.plan import Plan
from headstart.tools.export.source import Export, ExportRequest
from headstart.tools.launch.launcher import EngineLauncher
from headstart.tools.launch.model_facts import ModelFacts


def export_advice(
    launcher: EngineLauncher, facts: ModelFacts, model: str | None, head: str | None = None, *, reasons: bool = False
) -> str:
    """Returns the commands that make `head`, or a head in this package for the model, usable in the engine; "" if there
    are none, or with `reasons` why not. For a Hub repo, whose tensors are not here, only the export targets for `head`.
    model: its name as the user gave it."""
    if not facts.local:
        targets = " or ".join(launcher.exports)
        return f"by its kind: headstart export --to {targets}" if head and targets else ""
    own = Path(head) if head else None
    heads = [own] if own else [*shipped_heads_at(hub.resolve(model)).values()]
    is_usable = not launcher.wrong_format(facts)  # beside a head
    plans, why = [], f"no export writes it for {launcher.title}"
    for target, request in [(target, ExportRequest(model, each)) for each in heads for target in launcher.exports]:
        try:
            plans.append((target, request, _plan(target, request)))
        except ModelError as error:  # the layout has no place for this head
            why = error.message
    if not plans:
        return f"headstart has the head {heads[0].name} for it, but {why}" if reasons and heads else ""
    target, request, plan = min(plans, key=lambda each: not (is_usable or each[2].is_model))
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


def _plan(target: str, request: ExportRequest) -> Plan:
    export: Export = registry.find("exports", target).EXPORT
    return export(request)
