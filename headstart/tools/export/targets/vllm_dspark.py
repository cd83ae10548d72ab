"""A block drafter with a Markov head in DSpark's layout, for vLLM and SGLang."""

from headstart.heads.layouts.writing import as_dspark
from headstart.tools.export.blocks import block_plan
from headstart.tools.export.plan import Plan, vllm_use
from headstart.tools.export.source import Request


def plan(request: Request) -> Plan:
    """Raises ModelError for a head that DSpark's layout has no place for."""
    return block_plan(request.source("block"), as_dspark, vllm_use("dspark", "DEPTH"))


EXPORT = plan
