"""Facts about a model for launchers, read from config.json and tensor headers, and the choice of a draft depth."""

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, replace

from headstart import hub
from headstart.config import AUTO, EngineConfig
from headstart.core import no_progress
from headstart.errors import ModelError, UsageError
from headstart.formats import gguf, open_described
from headstart.formats.base import Checkpoint
from headstart.formats.gguf_file import GgufFile
from headstart.formats.sizes import Sizes
from headstart.formats.tensor_parts import MTP, part_of
from headstart.models.classify import DrafterKind, classify, classify_path, mtp_modules
from headstart.models.families import find_mtp_family
from headstart.models.mtp import declared
from headstart.tools.draft_depth import default_depth
from headstart.tools.plan.shape import SizedModel
from headstart.tools.plan.sources import sized_model
from headstart.tools.saved import load_setting

Advise = Callable[[], str]  # the commands that make a head usable in the engine; "" without any


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    source: str  # the model argument for the engine: a path, a Hub repo, or a GGUF file in one (org/model/file.gguf)
    revision: str = ""  # of a Hub repo; empty: the main branch
    model_type: str
    format: str  # safetensors, gguf
    weight_bytes: int | None  # None: unknown without the weights
    modules: int  # native MTP modules in the checkpoint; without tensors the number that the config declares
    attention_heads: int
    experts: int
    remote_code: bool = False
    declared: int = 0  # MTP modules that the config declares
    drafter: DrafterKind | None = None  # a block drafter inside the checkpoint, whose layers count as modules
    local: bool = True
    sized: SizedModel | None = None  # sizes for memory estimates; None if the config does not name them


def read_facts(model: str | None) -> ModelFacts:
    """Reads config and tensor headers of a directory, a .gguf file or a Hub repo. Raises UsageError or ModelError."""
    if repo := hub.repo_of(model) if model else None:
        from headstart.formats.remote import read_repo  # the Hub's client is slow to import

        facts = _facts(read_repo(repo, no_progress), "/".join(filter(None, (repo.repo, repo.file))))
        return replace(facts, local=False, revision=repo.revision)
    path = hub.resolve(model)
    files = gguf.read_parts(path) if gguf.detect(path) else open_described(str(path))
    return _facts(files, str(path))


def _facts(found: Checkpoint | list[GgufFile], source: str) -> ModelFacts:
    """Returns the facts of a checkpoint, or of the parts of a GGUF file. MTP modules count only if their tensors are
    present, or no tensors are known."""
    return _config_facts(found, source) if isinstance(found, Checkpoint) else _gguf_facts(found, source)


def _gguf_facts(parts: list[GgufFile], source: str) -> ModelFacts:
    metadata, tensors = parts[0].metadata, ChainMap(*(part.tensors for part in parts))
    kind = str(metadata.get("general.architecture", "unknown"))

    def number(key: str) -> int:
        value = metadata.get(f"{kind}.{key}", 0)
        return int(value) if isinstance(value, int | float) else 0

    promised = number("nextn_predict_layers")
    return ModelFacts(
        source=source, model_type=kind, format="gguf", weight_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        modules=promised if any(".nextn." in name for name in tensors) else 0,
        attention_heads=number("attention.head_count") or 1, experts=number("expert_count"), declared=promised,
    )  # fmt: skip


def _config_facts(found: Checkpoint, source: str) -> ModelFacts:
    config, tensors = found.config, found.tensors or None
    sizes, family = Sizes(config), find_mtp_family(config)
    promised = (family.layout.declared(config) if family else declared(config)).modules
    layers = sizes.get("layers") or 0
    there = tensors is None or any(part_of(name, layers) == MTP for name in tensors)
    try:
        sized = sized_model(source, config, tensors)
    except (ModelError, UsageError):
        sized = None
    own = classify(config) if family and family.layout.method != "mtp" and there else None
    weight_bytes = sum(tensor.nbytes for tensor in tensors.values()) if tensors is not None else None
    return ModelFacts(
        source=source, model_type=str(sizes.config.get("model_type") or "unknown"), format="safetensors",
        weight_bytes=weight_bytes or (int(sum(sized.weight_bytes().values())) if sized else None),
        modules=promised if there else 0, attention_heads=sizes.get("heads") or 1,
        experts=sizes.get("experts") or 0, remote_code="auto_map" in config, declared=promised, sized=sized,
        drafter=own,
    )  # fmt: skip


def drafter_of(head: str, advise: Advise = str) -> DrafterKind:
    """Returns a separate head's kind. Raises UsageError for a head that no engine runs, or that must be exported first;
    the latter's hint is `advise()`."""
    found = classify_path(head)
    if found.method == "headstart":
        hint = advise() or "no export writes it for this engine: headstart train makes other kinds"
        raise UsageError(f"--head: {head} is in headstart's own layout", hint)
    if not found.method:
        raise UsageError(f"--head: {head} is {found.title}, which no engine here is known to run")
    return found


def choose_depth(
    facts: ModelFacts, depth: int | None, drafter: DrafterKind | None, *, gpus: int, advise: Advise = str
) -> tuple[int, str]:
    """Returns the draft depth and the reason for it. The user's `depth` comes first, then for the model's own MTP
    modules (drafter None) the depth that `headstart tune` found, then a default. Raises UsageError if the drafter or
    the modules cannot draft `depth` tokens; the hint for a model without a head is `advise()`."""
    if depth is not None:
        _check_depth(facts, depth, drafter, advise)
        return depth, "set by --depth"
    if drafter is None:
        if not facts.modules:
            return 0, _why_no_head(facts)
        tuned = load_setting(facts.source, EngineConfig())
        if tuned and tuned.depth and tuned.depth != AUTO:  # a tuned depth of 0 does not apply to other engines
            return tuned.depth, "tuned on this machine"
        drafter = mtp_modules(facts.modules)
    return default_depth(drafter, gpus=gpus)


def _check_depth(facts: ModelFacts, depth: int, drafter: DrafterKind | None, advise: Advise) -> None:
    """Raises UsageError for a depth without a head, above the limit, or no multiple of the number of modules."""
    if drafter is not None:
        most = drafter.max_drafts or (drafter.num_modules if drafter.method == "medusa" else None)
        if most and depth > most:
            raise UsageError(f"--depth is {depth}, but the drafter makes {most} drafts at once", f"choose 1 to {most}")
    elif depth and not facts.modules:
        raise UsageError(f"--depth is {depth}, but {_why_no_head(facts)}", advise() or "give --head, or --depth 0")
    elif depth > facts.modules and depth % facts.modules:
        below = depth - depth % facts.modules
        what = f"the head has {facts.modules} modules: deeper drafts must be a multiple of that"
        raise UsageError(f"--depth is {depth}, but {what}", f"choose {below} or {below + facts.modules}")


def _why_no_head(facts: ModelFacts) -> str:
    if facts.declared:
        return f"the config declares {facts.declared} MTP modules, but their tensors are not in the checkpoint"
    return "the model has no MTP head"
