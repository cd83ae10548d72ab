"""A block drafter in DFlash's layout, for vLLM, SGLang and llama.cpp's converter."""

from headstart.heads.layouts.writing import as_dflash
from headstart.tools.export.blocks import block_plan
from headstart.tools.export.plan import Plan, vllm_use
from headstart.tools.export.source import Request


def plan(request: Request) -> Plan:
    """Raises ModelError for a head that DFlash's layout has no place for."""
    return block_plan(request.source("block"), as_dflash, vllm_use("dflash", "DEPTH"))


EXPORT = plan
