"""Default depth of other engines, whose depth is one number that does not follow costs and acceptance."""

from headstart.models.classify import DrafterKind

CPU_DEPTH = 1
"""Default depth on a CPU. A step of today's CPU engines costs more with every row: of depths 1 and 3 only depth 1 was
not slower than plain decoding."""
GPU_DEPTH = 3  # SGLang's default depth for heads of one module, which runs once for each draft token
P_MIN = 0.75
"""Probability below which llama.cpp stops a draft. Its project measured its default of 0 as slower by a quarter or
more."""


def default_depth(drafter: DrafterKind, *, gpus: int) -> tuple[int, str]:
    """Returns the depth and the reason for it. gpus: 0 for a CPU."""
    modules, is_mtp = drafter.num_modules, drafter.method == "mtp"
    if drafter.max_drafts:
        return drafter.max_drafts, f"the tokens that one block of {drafter.block} drafts"
    if drafter.method == "medusa":
        return modules, "one for each Medusa head"
    if is_mtp and modules > 1:
        return min(modules, GPU_DEPTH), f"the head has {modules} modules, one for each draft"
    if not gpus:
        return CPU_DEPTH, "deeper drafts cost more than they save on a CPU"
    why = "one module, used again for each draft" if is_mtp else f"{drafter.title}, one step for each draft"
    return GPU_DEPTH, why
