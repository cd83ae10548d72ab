"""`headstart pull`: fetch a model into the cache."""

from __future__ import annotations

from headstart.cli.options import Model, OutputOptions
from headstart.cli.render import print_json

EXAMPLES = ("headstart pull", "headstart pull org/model", "headstart pull smollm2-135m-mtp --json")


def run(model: Model = None, *, output: OutputOptions) -> int:
    """Fetch a model, check it, keep it in the user cache; does nothing when it is already there."""
    from headstart import hub

    hub.pull(model)
    alias = hub.resolve_alias(model)
    if output.as_json:
        heads = {kind: str(path) for kind, path in alias.heads.items()}
        print_json({"model": alias.name, "path": str(alias.trunk), "heads": heads})
    else:
        print(alias.trunk)
    return 0
