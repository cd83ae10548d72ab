"""Verdict on a checkpoint's native heads: one word, the reason and the remedy, for `inspect` and for loading errors."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from headstart.errors import HeadstartError, ModelError
from headstart.formats.base import Checkpoint
from headstart.heads.kind import new_head_spec
from headstart.models.expected import ModuleCheck
from headstart.models.mtp import MTP_MODULE
from headstart.models.native_heads import NativeHeads, examine
from headstart.models.tensors import find_family, read_config

Word = Literal["alive", "stripped", "partial", "undeclared", "mismatch", "none", "unchecked", "dead"]
SHOWN = 3  # names listed in a message


@dataclass(frozen=True)
class HeadState:
    """The verdict on heads."""

    word: Word
    reason: str
    fix: str = ""  # what to do; empty if nothing

    @property
    def broken(self) -> bool:
        """True if heads that the config declares are missing, incomplete, wrong or dead."""
        return self.word in ("stripped", "partial", "mismatch", "dead")

    def __str__(self) -> str:
        return f"{self.reason}; {self.fix}"

    def as_error(self, name: str) -> ModelError:
        """The error for loading heads in this state. name: the checkpoint."""
        return ModelError(f"{name}: {self.reason}", self.fix)

    def document(self) -> dict[str, Any]:
        return {"verdict": self.word, "reason": self.reason, "fix": self.fix, "broken": self.broken}


def state_of(heads: NativeHeads, checkpoint: Checkpoint) -> HeadState:
    """The state of a checkpoint's native heads, by tensor names and shapes."""
    words = _Words(heads, checkpoint)
    promise = words.promise()
    if not heads.parts:
        return unchecked(promise, "unchecked" if heads.promised.modules else "none")
    if not heads.names:
        return _without(heads, words, checkpoint)
    if heads.unread:
        reason = f"{promise} and {len(heads.names)} MTP tensors are there, but they cannot be checked"
        return HeadState("unchecked", f"{reason}: {heads.unread.message}", heads.unread.hint)
    if heads.refused:
        reason = f"{promise} and {len(heads.names)} MTP tensors are there, but they cannot run: {heads.refused}"
        return HeadState("mismatch", reason, "headstart runs the model without them; another engine may know them")
    if heads.unchecked:
        return _unknown(heads, promise)
    if heads.moved_to:
        return _moved_state(heads.moved_to[0], heads.num_layers)
    return _compared(heads, heads.modules[: heads.promised.modules or len(heads.modules)], words)


def _compared(heads: NativeHeads, wanted: list[ModuleCheck], words: "_Words") -> HeadState:
    """The state by the checks of the modules that engines load."""
    promise = words.promise()
    if not any(module.found for module in wanted):
        return HeadState("stripped", f"{promise}, but none of their tensors is there", words.graft)
    if missing := [name for module in wanted for name in module.missing]:
        return HeadState("partial", f"{promise}, but {tensors(len(missing))} missing: {some(missing)}", words.graft)
    if wrong := [each for module in wanted for each in module.wrong_shape]:
        shapes = [f"{each.name} is {list(each.shape)}, not {shape_text(each.expected)}" for each in wrong]
        reason = f"{tensors(len(wrong))} of another shape than the config asks for: {some(shapes)}"
        return HeadState("mismatch", reason, f"the head is of another model, or {words.file} is; {words.graft}")
    if unusable := [why for module in wanted for why in module.unusable]:
        return HeadState("partial", f"{promise}, but {some(unusable)}", words.graft)
    there = f"all {sum(module.required for module in wanted)} tensors of {words.count(len(wanted))} are there, in shape"
    silent = heads.promised.key is None and heads.layout is not None and heads.layout.released and not heads.gguf
    if not heads.promised.modules and not silent:
        fix = f'set "{words.key}" to {len(wanted)} in {words.file}'
        return HeadState("undeclared", f"{there}, but the config does not say so", fix)
    return HeadState("alive", f"{there} (by names and shapes; --deep measures)")


class UsableHeads(NamedTuple):
    """The native heads of a checkpoint that loading may use."""

    num_modules: int | None
    """MTP modules to load; None for a family without MTP modules, and for one that the engine cannot run."""
    broken: HeadState | None  # set if the config declares heads that cannot be used


def usable_heads(checkpoint: Checkpoint) -> UsableHeads:
    """Finds the native heads that loading may use, from headers and by the same rules as `headstart inspect`.

    Raises ModelError if the heads are at another layer than num_hidden_layers says, which then is wrong for the trunk.
    """
    heads = examine(checkpoint)
    if heads.layout is None or heads.layout.tensors:
        return UsableHeads(None, None)
    state = state_of(heads, checkpoint)
    if heads.moved_to:
        raise state.as_error(checkpoint.name)
    return UsableHeads(heads.count if state.word == "alive" else 0, state if heads.count and state.broken else None)


class _Words:
    """Names for messages about one checkpoint: its config file, the key of the number of modules, the graft command."""

    def __init__(self, heads: NativeHeads, checkpoint: Checkpoint) -> None:
        self.heads = heads
        known = heads.layout.count_key if heads.layout else "num_nextn_predict_layers"
        self.key, self.file = heads.promised.key or known, "config.json"
        graft = f"headstart graft {shlex.quote(checkpoint.name)} --from BASE -o OUT"
        self.graft = f"put it back from the model that this one was made from: {graft}"
        if heads.gguf:
            self.key, self.file = f"{heads.gguf}.nextn_predict_layers", f"the metadata of {checkpoint.path.name}"
            self.graft = "convert the original again: convert_hf_to_gguf.py keeps the MTP head unless told --no-mtp"

    def count(self, modules: int) -> str:
        what = self.heads.layout.module if self.heads.layout else MTP_MODULE
        return f"{modules} {what}{'' if modules == 1 else 's'}"

    def promise(self) -> str:
        count, key = self.heads.promised
        if key and count:
            return f"the config promises {self.count(count)} ({self.key} = {count})"
        if key:
            return f"the config promises none ({self.key} = 0)"
        if count:
            return f"the family has {self.count(count)} unless the config says otherwise"
        if (layout := self.heads.layout) and layout.released and self.heads.names:
            return f"released {layout.title} checkpoints have {self.count(layout.released)}"
        return "the config promises none"


def unchecked(promise: str, word: Word = "unchecked") -> HeadState:
    """The state for a config.json without weights. promise: what the config declares."""
    return HeadState(word, f"{promise}; there are no weights here to check", "inspect it with its *.safetensors")


def dead(acceptance: float) -> HeadState:
    """The state of a head whose measured acceptance rate of first tokens (0..1) is too low."""
    reason = f"it is there, but of its first drafts {acceptance:.1%} are accepted"
    fix = "is it this model's, and of its norm convention? graft it again, or train another: headstart train"
    return HeadState("dead", reason, fix)


def misread(deep: Mapping[str, Any]) -> HeadState:
    """The state of a drafter whose weights draft better with another setting than config.json has. deep: result of
    `inspect --deep`."""
    better = deep["better"]
    lengths = f"acceptance length {better['acceptance_length']:.2f} instead of {better['instead_of']:.2f}"
    fix = better["fix"] if deep["method"] == "mtp" else f"in config.json: {better['fix']}"
    return HeadState("mismatch", f"its weights fit {better['what']}: {lengths}", fix)


def _without(heads: NativeHeads, words: _Words, checkpoint: Checkpoint) -> HeadState:
    promise, layout = words.promise(), heads.layout
    if heads.promised.modules:
        fix = words.graft + (f"; or set {words.key} to 0" if heads.promised.key else "")
        return HeadState("stripped", f"{promise}, but no such tensors are there", fix)
    if layout and layout.released and heads.promised.key is None:
        reason = f"no MTP tensors, though released {layout.title} checkpoints have them and no key to say so"
        return HeadState("none", reason, words.graft)
    return HeadState("none", f"no MTP tensors, and {promise}", _how_to_train(checkpoint))


def _how_to_train(checkpoint: Checkpoint) -> str:
    """Advice for a model without heads: the command that trains one, if `headstart train` accepts this model."""
    try:
        new_head_spec("mtp", read_config(checkpoint, find_family(checkpoint)))
    except HeadstartError:
        return "headstart train makes heads for models that run here, which this one does not"
    return f"make one: headstart train {shlex.quote(checkpoint.name)} --out HEAD --minutes 60"


def _unknown(heads: NativeHeads, promise: str) -> HeadState:
    count = f"{len(heads.names)} MTP tensors are there"
    if not heads.promised.modules:
        return HeadState("undeclared", f"{count}, but {promise}; the family is not known, so they were not checked")
    return HeadState("alive", f"{promise} and {count}; the family is not known, so names and shapes were not checked")


def _moved_state(there: int, wanted: int) -> HeadState:
    looked = f"with num_hidden_layers = {wanted} engines look at {wanted}"
    fix = f"set num_hidden_layers to {there} if the trunk has that many layers, else rename layers.{there} to {wanted}"
    return HeadState("mismatch", f"the MTP tensors are those of layer {there}, but {looked}", fix)


def tensors(count: int) -> str:
    """Start of a sentence about `count` tensors: `1 tensor is`, `2 tensors are`."""
    return "1 tensor is" if count == 1 else f"{count} tensors are"


def some(names: list[str]) -> str:
    """The first SHOWN names, comma-separated, and the number of the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def shape_text(shape: Iterable[int | str | None]) -> str:
    """A shape as text, with * for sizes that are not known."""
    return f"[{', '.join(str(size) if isinstance(size, int) else '*' for size in shape)}]"
