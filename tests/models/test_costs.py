"""Costs of every family: weights, cache and states of a plan equal the family's tensors and the engine's pools."""

import math

import pytest
from support import ALL_FAMILIES, family_of, tiny_model

from headstart.heads.kind import head_kind
from headstart.kernels.specs import CompressSpec
from headstart.layers.costs import num_elements
from headstart.models.described import DESCRIBED
from headstart.models.families import all_families, known_family, read_any
from headstart.tools.plan.shape import SizedModel, Split, cache_bytes
from headstart.tools.plan.sources import CARD_NAMES, CARDS, shape_of

FLOAT_BYTES = 4


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_plan_counts_the_tensors_of_the_family(family: str) -> None:
    """Covers all weights of the tiny model, including its MTP modules."""
    config = family_of(family).tiny_config()
    sizes, shape = family_of(family).read(config), shape_of("tiny", config)
    assert not shape.notes
    parameters = shape.parameters()
    head = parameters.pop("head") if shape.drafter.assumed else 0
    assert head > 0 or not shape.drafter.assumed
    assert sum(parameters.values()) == num_elements(family_of(family).shapes(sizes))
    spec = family_of(family).head_of(sizes)
    if spec is not None:
        assert parameters["head"] == num_elements(head_kind(spec.kind).shapes(spec, sizes.hidden_size))


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_plan_counts_the_cache_of_the_engine(family: str) -> None:
    """Bytes of a position and of a sequence's states in a float32 cache."""
    model = tiny_model(family, dtype="float32")
    specs, states = model.decoder.kv_specs, model.decoder.state_specs
    costs = [cost.mixer for cost in model.config.cost().layers]
    per_position = sum(model.backend.kv_bytes(spec) for spec in specs)
    assert sum(cost.pool_width for cost in costs) * FLOAT_BYTES == per_position
    state_bytes = sum(model.backend.state_bytes(spec) for spec in states)
    assert sum(cost.state for cost in costs) * FLOAT_BYTES == state_bytes
    if not any(isinstance(spec, CompressSpec) for spec in specs):  # a plan counts one entry for several positions
        trunk = sum(cost.cached(1) * FLOAT_BYTES + cost.state * FLOAT_BYTES for cost in costs)
        assert trunk == per_position + state_bytes
        sized = SizedModel(shape=shape_of("tiny", family_of(family).tiny_config()), kv=4)
        drafter = sized.shape.drafter
        mixers = [group.cost.mixer for group in drafter.layers]
        module = sum(each.cached(1) + each.state for each in mixers) * FLOAT_BYTES * drafter.num_modules
        assert cache_bytes(sized, Split(device=1e9), 1) == trunk + module


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_attention_work_grows_with_the_context(family: str) -> None:
    for cost in family_of(family).read(family_of(family).tiny_config()).cost().layers:
        work = [cost.mixer.multiply_adds(context) for context in (0, 8, 512, 4096)]
        assert work == sorted(work) and cost.active_weights <= cost.weights
        assert (work[0] < work[1]) == (cost.mixer.kv_width > 0)


@pytest.mark.slow
@pytest.mark.parametrize("card", CARD_NAMES)
def test_model_card_is_read_by_its_family(card: str) -> None:
    """The family reads the config without the generic reader, and the plan counts all tensors of the family."""
    family, sizes, note = read_any(CARDS[card]["config"])
    assert family is known_family(CARDS[card]["config"]["model_type"]) and not note and not family.unsupported
    parameters = shape_of(card, CARDS[card]["config"]).parameters()
    has_head = family.head_of(sizes) is not None
    total = sum(count for part, count in parameters.items() if has_head or part != "head")
    assert total == sum(math.prod(shape) for shape in family.shapes(sizes).values())


COMMON = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 4096,
}  # fmt: skip
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "n_shared_experts": 1}
INDEXER = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 32}
BLOCKS = {"sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_topk_blocks": 4, "sparse_block_size": 16}
OWN = {
    "bailing_hybrid": {**LATENT, **EXPERTS, "layer_group_size": 4}, "dots3_note": {**LATENT, **EXPERTS, **INDEXER},
    "glm5_next": {**LATENT, **EXPERTS, **INDEXER, "hc_mult": 4, "layer_types": ["linear_attention"] * 4 + ["full"] * 4},
    "hy_v4": {**LATENT, **EXPERTS, **INDEXER, "hc_mult": 4, "indexer_types": ["full", *["shared"] * 7]},
    "mimo_v2": {**EXPERTS, "n_routed_experts": 16, "sliding_window": 128, "v_head_dim": 32, "n_shared_experts": None},
    "minicpm3": LATENT, "minimax_m3": {**EXPERTS, "sparse_attention_config": BLOCKS},
    "pangu_ultra_moe": {**LATENT, **EXPERTS},
}  # fmt: skip


@pytest.mark.parametrize("name", DESCRIBED)
def test_described_family_has_costs(name: str) -> None:
    """Holds for families that the engine does not run."""
    family, sizes, note = read_any({**COMMON, **OWN.get(name, {}), "model_type": name})
    assert family is DESCRIBED[name] and family.unsupported and not note
    assert sizes.num_layers == 8
    cost = sizes.cost()
    total = sum(each.weights for each in cost.layers) + cost.outer + cost.embedding + cost.lm_head
    assert total == num_elements(sizes.shapes())
    kinds = {each.mixer for each in cost.layers}
    mixed = ("bailing_hybrid", "glm5_next", "hy_v4", "mimo_v2")
    assert len(kinds) == (2 if name in mixed else 1)


def test_model_types_are_unique() -> None:
    names = [name for family, each in all_families().items() for name in (family, *each.aliases)]
    assert len(names) == len({*names})
