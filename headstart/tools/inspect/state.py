"""One word for the state of a checkpoint's heads, the reason for it, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headstart.tools.inspect.heads import Heads

Word = Literal["alive", "stripped", "partial", "undeclared", "mismatch", "none", "unchecked", "dead"]
Scalar = int | str | list[int] | None
SHOWN = 3
_GRAFT = "put it back from the model that this one was made from: headstart graft {model} --from BASE -o OUT"


@dataclass(frozen=True)
class Check:
    """One thing that a drafter and its target must agree on."""

    what: str
    drafter: Scalar
    target: Scalar
    ok: bool


@dataclass(frozen=True)
class HeadState:
    """`broken`: the config promises heads that are not (all) there."""

    word: Word
    reason: str
    fix: str = ""

    @property
    def broken(self) -> bool:
        return self.word in ("stripped", "partial", "mismatch", "dead")

    def document(self) -> dict[str, Any]:
        return {"verdict": self.word, "reason": self.reason, "fix": self.fix, "broken": self.broken}


def state_of(heads: Heads, model: str) -> HeadState:
    """The state of native heads, from headers."""
    graft, promise = _GRAFT.format(model=model), _promise(heads)
    if not heads.parts and heads.promised.modules:
        return unchecked(promise)
    if not heads.names:
        return _without(heads, promise, graft)
    if heads.layout is None:
        return _unknown(heads, promise)
    wanted = heads.modules[: heads.promised.modules or len(heads.modules)]
    if not any(module.found for module in wanted):
        return HeadState("stripped", f"{promise}, but none of their tensors is there", graft)
    if missing := [name for module in wanted for name in module.missing]:
        return HeadState("partial", f"{promise}, but {tensors(len(missing))} missing: {some(missing)}", graft)
    if heads.moved_to:
        return _moved(heads.moved_to[0], heads.num_layers)
    if wrong := [each for module in wanted for each in module.wrong_shape]:
        shapes = [f"{each.name} is {list(each.shape)}, not {shape_text(each.expected)}" for each in wrong]
        reason = f"{tensors(len(wrong))} of another shape than the config asks for: {some(shapes)}"
        return HeadState("mismatch", reason, f"the head is of another model, or config.json is; {graft}")
    if unusable := [why for module in wanted for why in module.unusable]:
        return HeadState("partial", f"{promise}, but {some(unusable)}", graft)
    there = f"all {sum(module.required for module in wanted)} tensors of {_count(len(wanted))} are there, in shape"
    if not heads.promised.modules and (heads.promised.key or heads.family is None or heads.family.released is None):
        key = heads.promised.key or (heads.family.count_key if heads.family else "num_nextn_predict_layers")
        fix = f'set "{key}" to {len(wanted)} in config.json'
        return HeadState("undeclared", f"{there}, but the config does not say so", fix)
    return HeadState("alive", f"{there} (by names and shapes; --deep measures)")


def unchecked(promise: str) -> HeadState:
    """Of a config.json without weights."""
    return HeadState("unchecked", f"{promise}; there are no weights here to check", "inspect it with its *.safetensors")


def dead(acceptance: float) -> HeadState:
    """Of a head that was measured."""
    reason = f"it is there, but of its first drafts {acceptance:.1%} are accepted"
    fix = "is it this model's, and of its norm convention? graft it again, or train it: headstart train --finetune"
    return HeadState("dead", reason, fix)


def misread(deep: Mapping[str, Any]) -> HeadState:
    """Of a drafter whose weights draft better when they are read otherwise than config.json says."""
    better, told = deep["better"], deep["depths"][-1]["acceptance_length"]
    lengths = f"acceptance length {better['acceptance_length']:.2f} instead of {told:.2f}"
    return HeadState("mismatch", f"its weights fit {better['what']}: {lengths}", f"in config.json: {better['fix']}")


def _promise(heads: Heads) -> str:
    count, key = heads.promised
    if key and count:
        return f"the config promises {_count(count)} ({key} = {count})"
    if key:
        return f"the config promises none ({key} = 0)"
    if count:
        return f"the family has {_count(count)} unless the config says otherwise"
    return "the config promises none"


def _count(modules: int) -> str:
    return f"{modules} MTP module{'' if modules == 1 else 's'}"


def _without(heads: Heads, promise: str, graft: str) -> HeadState:
    if heads.promised.modules:
        fix = graft + (f"; or set {heads.promised.key} to 0" if heads.promised.key else "")
        return HeadState("stripped", f"{promise}, but no such tensors are there", fix)
    if heads.family and heads.family.released and heads.promised.key is None:
        reason = f"no MTP tensors, though released {heads.family.title} checkpoints have them and no key to say so"
        return HeadState("none", reason, graft)
    return HeadState("none", f"no MTP tensors, and {promise}", "headstart train makes a head for a supported model")


def _unknown(heads: Heads, promise: str) -> HeadState:
    count = f"{len(heads.names)} MTP tensors are there"
    if not heads.promised.modules:
        return HeadState("undeclared", f"{count}, but {promise}; the family is not known, so they were not checked")
    return HeadState("alive", f"{promise} and {count}; the family is not known, so names and shapes were not checked")


def _moved(there: int, wanted: int) -> HeadState:
    looked = f"with num_hidden_layers = {wanted} engines look at {wanted}"
    fix = f"set num_hidden_layers to {there} if the trunk has that many layers, else rename layers.{there} to {wanted}"
    return HeadState("mismatch", f"the MTP tensors are those of layer {there}, but {looked}", fix)


def tensors(count: int) -> str:
    """`1 tensor is`, `2 tensors are`."""
    return "1 tensor is" if count == 1 else f"{count} tensors are"


def some(names: list[str]) -> str:
    """The first few."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def shape_text(shape: Iterable[int | str | None]) -> str:
    """A shape with * for what may be of any size."""
    return f"[{', '.join(str(size) if isinstance(size, int) else '*' for size in shape)}]"
