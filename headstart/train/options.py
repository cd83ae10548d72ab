"""Options of `headstart train`, and their checks. Nothing here needs torch: refusals come in the first second."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from headstart.errors import ModelError, UsageError
from headstart.files import user_path
from headstart.formats import find_checkpoint
from headstart.formats.adapter import AdapterFile, names_of, read_adapter
from headstart.formats.base import Checkpoint
from headstart.heads.base import HeadSpec
from headstart.heads.files import read_head
from headstart.heads.kind import HeadCheckpoint, Training, head_kind, is_plain, new_head_spec, trained_kinds
from headstart.hub import DEFAULT_MODEL
from headstart.layers.build import DecoderConfig
from headstart.models.base import Family
from headstart.models.head_state import usable_heads
from headstart.models.lora import REMEDY, fit_adapter
from headstart.models.shipped_heads import shipped_heads
from headstart.models.tensors import find_family, read_config
from headstart.train.flags import TrainFlags
from headstart.wording import flag_of

MIN_TEXT_TOKENS = 1_000  # fewest tokens of answers or plain text that a new head is trained on
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainFlags):
    """TrainFlags for a model, with choices of `headstart adapt`."""

    model: str = DEFAULT_MODEL
    measure_speedup: bool = True  # on this machine, after training
    update_share: float = 1.0  # see Recipe

    @property
    def work(self) -> Path:
        return self.out.with_name(self.out.name + ".training")

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    @property
    def steps(self) -> int:
        """Number of trained draft steps."""
        return training_of(self.kind).depth if self.depth is None else self.depth

    @property
    def min_text_tokens(self) -> int:
        """Fewest tokens of training text: 0 for --finetune, since the head has learned before."""
        return 0 if self.finetune else MIN_TEXT_TOKENS

    @property
    def own_text(self) -> Path:
        """Folder of the text that the model writes if no text is given."""
        return self.work / "text"

    @cached_property
    def adapter(self) -> AdapterFile | None:
        """The adapter of `lora`, read at first use. Raises ModelError."""
        return read_adapter(self.lora) if self.lora else None

    @property
    def model_name(self) -> str:
        """The model for the record: the last part of a path, else as it is."""
        return Path(self.model).name if user_path(self.model).exists() else self.model

    @property
    def command(self) -> str:
        """The equivalent command line, for the record."""
        words = [self.model_name, "--out", self.out.name, *(["--finetune"] if self.finetune else [])]
        files = {"--data": self.data, "--prompts": self.prompts, "--head": (self.head,) if self.head else (),
                 "--lora": (self.lora,) if self.lora else ()}  # fmt: skip
        words += [word for flag, paths in files.items() for path in paths for word in (flag, path.name)]
        return command_line(self, words, ("kind", "minutes", "tokens", "depth", "modules", "draft_vocab", "seed"))


def check(options: TrainOptions) -> None:
    """Raises UsageError or ModelError for a run that cannot work; reads headers only."""
    check_bound(options.minutes, options.tokens, options.seed)
    if not options.data and not options.prompts:
        raise UsageError("train needs text to learn from", "give --data or --prompts")
    if options.head is not None and not options.finetune:
        raise UsageError("--head says what to begin with, which only --finetune does", "add --finetune")
    if options.kind not in (kinds := trained_kinds()):
        raise UsageError(f"--kind is {options.kind!r}, which is unknown", f"choose {' or '.join(kinds)}")
    if options.modules != 1 and not (1 < options.modules <= options.steps and training_of(options.kind).stacks):
        raise UsageError(
            f"--modules is {options.modules} at --kind {options.kind} and --depth {options.steps}",
            "a head of kind mtp may have a layer for each draft step; others decide it themselves",
        )
    if options.lora is not None and options.device != "cpu":
        raise UsageError("--lora trains on the CPU only", "leave out --device")
    if options.out.exists() and not _is_head(options.out):
        # exporting replaces the directory: never one that holds something else
        raise UsageError(f"{options.out} exists and is not a head", "give --out a new name")
    _check_model(options)


def _check_model(options: TrainOptions) -> None:
    """Raises ModelError or UsageError where model, head or the head at `out` rule the run out. Reads headers only."""
    checkpoint = find_checkpoint(options.model)
    family = find_family(checkpoint)
    config = read_config(checkpoint, family)
    spec = new_head_spec(options.kind, config, options.steps, options.modules)
    if options.adapter:
        _check_adapter(options.adapter, checkpoint, family, config)
    if options.finetune:
        native = family.head_of(replace(config, num_mtp=usable_heads(checkpoint).num_modules or 0))
        if native and not options.head:
            check_native_head(native, options.kind)
            spec = native
        else:
            spec = head_kind(options.kind).fit(saved_head(checkpoint, options.kind, options.head).spec, config)
        if not spec.block and spec.module_of(options.steps - 1) is None:
            what = f"--depth is {options.steps}, but the head to begin with has {spec.num_modules} module(s)"
            raise UsageError(what, f"--depth {spec.depth_limit}")
    if (options.out / "config.json").exists():
        head = read_head(options.out)
        found = (head.spec.kind, head.hidden_size, head.vocab_size)
        if found != (options.kind, config.hidden_size, config.vocab_size):
            what = f"kind {found[0]}, hidden size {found[1]}, vocabulary {found[2]}"
            raise UsageError(f"{options.out} holds another head: {what}", "give --out a new name")
        if (tap := head_kind(options.kind).fit(head.spec, config).tap) != spec.tap:
            what = f"{options.out} holds another head: it taps {tap}, not {spec.tap}"
            raise UsageError(what, "give --out a new name")


LM_HEADS = ("lm_head.weight", "embed_tokens.weight")
"""Ends of the names of LM heads; the second: of one that is tied to the embedding."""


def _check_adapter(adapter: AdapterFile, checkpoint: Checkpoint, family: Family, config: DecoderConfig) -> None:
    """Raises ModelError for an adapter that does not fit the model, or that changes its LM head: heads learn from
    distributions that are computed with the model's own LM head."""
    factors = fit_adapter(adapter, checkpoint, family, config)
    if left := {each.name for each in factors if each and each.name.endswith(LM_HEADS)}:
        raise ModelError(f"{adapter.path}: train does not support LoRA of {names_of(left)}", REMEDY)


def training_of(kind: str) -> Training:
    training = head_kind(kind).training
    assert training is not None, "check has been called"
    return training


def _is_head(path: Path) -> bool:
    try:
        read_head(path)
    except ModelError:
        return path.is_dir() and not any(path.iterdir())
    return True


def check_bound(minutes: float | None, tokens: int | None, seed: int) -> None:
    """Raises UsageError for a bad seed, and unless exactly one of `minutes` and `tokens` is given and above 0."""
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"--seed is {seed}, but must be between 0 and {MAX_SEED}")
    if (minutes is None) == (tokens is None):
        hint = "for example --minutes 60" if minutes is None else "both are given: leave one out"
        raise UsageError("train needs a bound: exactly one of --minutes and --tokens", hint)
    check_limits(minutes, tokens)


def check_limits(minutes: float | None, tokens: int | None) -> None:
    """Raises UsageError for limits that are not finite or not above 0."""
    for flag, limit in (("--minutes", minutes), ("--tokens", tokens)):
        if limit is not None and not 0 < limit < math.inf:
            raise UsageError(f"{flag} is {limit}, but must be a finite number above 0")


def command_line(options: object, words: Sequence[str], names: Sequence[str]) -> str:
    """`headstart train` with these words and the named options that have a value."""
    words = ["headstart", "train", *words]
    for name in names:
        if (value := getattr(options, name)) is not None:
            words += [flag_of(name), f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def check_amount(num_tokens: int, min_tokens: int) -> None:
    """Raises UsageError for a training text below `min_tokens`."""
    if num_tokens < min_tokens:
        what = (
            f"the text to learn from has {num_tokens:,} tokens, but a new head needs {min_tokens:,} at the very least"
        )
        hint = "bring text: --data FILE or FOLDER (JSONL of texts or chats), or --prompts FILE, which the model answers"
        raise UsageError(what, f"{hint}; a good head takes a million tokens")


def check_native_head(spec: HeadSpec, kind: str) -> None:
    """Raises ModelError for a checkpoint's own head that training cannot continue."""
    hint = "leave out --finetune: a new head is trained beside it"
    if spec.kind != kind or spec.num_modules != 1:
        raise ModelError(f"the checkpoint's own head is no single {kind} module, which --finetune needs", hint)
    if not is_plain(spec.layer):
        what = "the checkpoint's own head has experts, or attention or norms that cannot be trained yet"
        raise ModelError(what, hint)


def saved_head(checkpoint: Checkpoint, kind: str, path: Path | None) -> HeadCheckpoint:
    """The head at `path`, by default the head of this kind in this package. Raises ModelError if there is none, or of
    another kind."""
    path = path or shipped_heads(checkpoint).get(kind)
    if path is None:
        raise ModelError(f"the model has no head of kind {kind} to fine-tune", "leave out --finetune, or give --head")
    head = read_head(path)
    if head.spec.kind != kind:
        raise ModelError(f"{path} is a head of kind {head.spec.kind}", f"--kind is {kind}")
    block = head.spec.block
    if block and (block.markov_kind != "vanilla" or block.conv_taps):
        what = f"{path} has convolutions or a Markov head of kind {block.markov_kind}, which is run, but not trained"
        raise ModelError(what, "leave out --finetune")
    return head
