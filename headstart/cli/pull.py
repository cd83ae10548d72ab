"""`headstart pull`: fetch a model into the cache."""

from __future__ import annotations

from headstart.cli.options import Model, OutputOptions
from headstart.cli.render import print_json, progress

EXAMPLES = ("headstart pull", "headstart pull org/model", "headstart pull smollm2-135m-mtp --json")


def run(model: Model = None, *, output: OutputOptions) -> int:
    """Fetch a model, check it, keep it in the user cache; does nothing when it is already there."""
    from headstart import hub

    with progress("fetching", quiet=output.as_json):
        path = hub.resolve(model)
    if output.as_json:
        print_json({"model": model, "path": str(path)})
    else:
        print(path)
    return 0
