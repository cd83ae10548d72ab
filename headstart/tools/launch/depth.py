"""How deep an engine is told to draft, and why."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.config import AUTO, EngineConfig
from headstart.errors import UsageError
from headstart.formats.drafters import DrafterKind
from headstart.tools.launch.facts import Facts
from headstart.tools.tune.setting import kept_setting

ON_CPU = 1
"""A step of today's CPU engines costs more with every row: of depths 1 and 3 only 1 was not slower than plain."""
ON_GPU = 3
"""SGLang's own default for heads of one module that are used again."""


@dataclass(frozen=True)
class ChosenDepth:
    """A depth, and where it comes from."""

    depth: int
    why: str


def tuned_depth(model: str) -> int | None:
    """The fixed depth that `headstart tune` has found for this model here; None if there is none, or it decides itself.
    That drafting does not pay in headstart says nothing about other engines."""
    setting = kept_setting(model, EngineConfig())
    return setting.depth if setting and setting.depth != AUTO else None


def choose_depth(facts: Facts, asked: int | None, drafter: DrafterKind | None, *, gpus: int) -> ChosenDepth:
    """`asked` wins, then what the drafter is made for (a block, one module for each draft), then what was tuned.
    `drafter` None: the model's own MTP modules. Raises UsageError where a depth cannot be."""
    if asked is not None:
        check(facts, asked, drafter)
        return ChosenDepth(asked, "as asked")
    if drafter is not None:
        return _of_drafter(drafter, gpus)
    if not facts.modules:
        return ChosenDepth(0, _no_head(facts))
    if tuned := tuned_depth(facts.source):
        return ChosenDepth(tuned, "tuned on this machine")
    if facts.modules > 1:
        return ChosenDepth(min(facts.modules, ON_GPU), f"the head has {facts.modules} modules, one for each draft")
    if not gpus:
        return ChosenDepth(ON_CPU, "deeper drafts cost more than they save on a CPU")
    return ChosenDepth(ON_GPU, "one module, used again for each draft")


def _of_drafter(drafter: DrafterKind, gpus: int) -> ChosenDepth:
    if drafter.most_drafts:
        return ChosenDepth(drafter.most_drafts, f"the tokens that one block of {drafter.block} drafts")
    if drafter.method == "medusa":
        return ChosenDepth(drafter.num_modules, "one for each Medusa head")
    if not gpus:
        return ChosenDepth(ON_CPU, "deeper drafts cost more than they save on a CPU")
    return ChosenDepth(ON_GPU, f"{drafter.title}, one step for each draft")


def check(facts: Facts, depth: int, drafter: DrafterKind | None) -> None:
    """Raises UsageError for drafts without a head, for more than a drafter makes at once, and for depths that are no
    multiple of the number of modules."""
    if not depth:
        return
    if drafter is not None:
        most = drafter.most_drafts or (drafter.num_modules if drafter.method == "medusa" else None)
        if most and depth > most:
            raise UsageError(f"--depth is {depth}, but the drafter makes {most} drafts at once", f"choose 1 to {most}")
        return
    if not facts.modules:
        raise UsageError(f"--depth is {depth}, but {_no_head(facts)}", "give --head, or --depth 0")
    if depth > facts.modules and depth % facts.modules:
        below = depth - depth % facts.modules
        what = f"the head has {facts.modules} modules: deeper drafts must be a multiple of that"
        raise UsageError(f"--depth is {depth}, but {what}", f"choose {below} or {below + facts.modules}")


def _no_head(facts: Facts) -> str:
    if facts.declared:
        return f"the config declares {facts.declared} MTP modules, but their tensors are not in the checkpoint"
    return "the model has no MTP head"
