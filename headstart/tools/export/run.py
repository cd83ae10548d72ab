"""`headstart export`: a head, or a model with its head, in the layout of another engine."""

import shlex

from headstart import registry
from headstart.core import Progress, Report, no_progress
from headstart.errors import UsageError
from headstart.tools.doctor import installed_gpus
from headstart.tools.draft_depth import default_depth
from headstart.tools.export.plan import check_sources, check_target, write_plan
from headstart.tools.export.source import Export, ExportRequest
from headstart.tools.options import ExportOptions
from headstart.wording import LEAVE_OUT

DEFAULT, SLICE = "xllm", "slice"


def run(options: ExportOptions, progress: Progress = no_progress) -> Report:
    """Writes a directory atomically. Raises UsageError, ModelError or CapacityError."""
    targets = [name.replace("_", "-") for name in registry.available("exports")]
    if options.to not in targets:
        hint = f"choose one of {', '.join(targets)}; SGLang reads vllm-eagle3 and vllm-dflash, llama.cpp reads gguf"
        raise UsageError(f"--to is {options.to!r}, which is unknown", hint)
    to = SLICE if options.slice is not None and options.to == DEFAULT else options.to
    if options.slice is not None and to != SLICE:
        raise UsageError(f"--slice goes with --to {SLICE} only", "write the smaller model first, and export that one")
    export: Export = registry.find("exports", to).EXPORT
    if options.model_type is not None and to != DEFAULT:
        raise UsageError(f"--model-type goes with --to {DEFAULT} only", LEAVE_OUT)
    request = ExportRequest(options.model, options.head, options.model_type, options.slice)
    check_target(options.out, options.force)
    check_sources(options.out, (request.path, request.find_head()))
    plan = export(request)
    size = write_plan(plan, options.out, progress)
    depth, _ = default_depth(plan.drafter, gpus=len(installed_gpus()))
    use = plan.use.format(out=shlex.quote(str(options.out)), path=options.out, depth=depth)
    data = {"out": str(options.out), "to": to, "bytes": size, "use": use, "notes": plan.notes, **plan.data}
    notes = [f"note: {note}" for note in plan.notes]
    return Report(True, data, [f"{options.out}: {size / 1e6:.0f} MB", *notes, f"use it with: {use}"])
