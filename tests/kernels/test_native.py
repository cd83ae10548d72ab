"""The native backend: row invariance, logits of the reference, and texts of tiny models of every family."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import FAMILIES, VOCAB, family_of, new_folder, prompt_of, soften
from tiny_models import write_model

from headstart import api
from headstart.config import EngineConfig
from headstart.core import SamplingParams, StateSteps, StepPlan
from headstart.engine.load import load_model
from headstart.kernels.native.placement import FREE, ThreadPlacement
from headstart.layers.build import build_decoder
from headstart.layers.weights import Weights
from headstart.models.tensors import canonical_tensors

native = pytest.importorskip("headstart.kernels.native.backend", exc_type=ImportError)
NativeBackend = native.NativeBackend
LENGTH = 100
BLOCKS = 12
TABLE = np.random.default_rng(5).permutation(BLOCKS).astype(np.int32)[None]
"""Block table of the one sequence of 16-position blocks: in no order."""


@cache
def folder(family: str) -> Any:
    config, arrays = family_of(family).tiny(num_hidden_layers=2, hidden_size=64, intermediate_size=96)
    return write_model(new_folder(), config, soften(arrays, 0.3))


@cache
def reference_model(family: str) -> Any:
    return load_model(str(folder(family)), EngineConfig(backend="reference", threads=1))


def one_state(start: int, end: int) -> StateSteps:
    """State steps that advance the state in slot 0 from position `start` to `end`."""
    arrays = ([0], [0 if start else -1], [start], [end], [0, 1], [end], [0])
    return StateSteps(*(np.array(each, np.int32) for each in arrays))


class Trunk:
    """A tiny trunk on one backend, for passes over one sequence."""

    def __init__(self, family: str, backend: Any) -> None:
        model = reference_model(family)
        weights = Weights(canonical_tensors(model.checkpoint, model.family, model.config), backend, "tiny")
        decoder = build_decoder(weights, model.config)
        pools = [backend.kv_pool(BLOCKS * 16, spec) for spec in decoder.kv_specs]
        states = [backend.state_pool(1, 1, 0, spec) for spec in decoder.state_specs]
        self.backend, self._handle = backend, backend.prepare(decoder.program(pools, state_pools=states))

    def logits(self, start: int, tokens: list[int]) -> NDArray[np.float32]:
        """Logits [R, V] of one pass over positions start .. start + R - 1."""
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        plan = StepPlan(
            token_ids=np.array(tokens, np.int32),
            positions=positions,
            slots=TABLE[0][positions // 16] * 16 + positions % 16,
            row_starts=np.array([0, len(tokens)], np.int32),
            block_tables=TABLE,
            logit_rows=np.arange(len(tokens), dtype=np.int32),
            states=one_state(start, start + len(tokens)),
        )
        return np.array(self.backend.numpy(self.backend.run(self._handle, plan)["logits"]))

    def chunked(self, tokens: list[int], sizes: tuple[int, ...]) -> NDArray[np.float32]:
        """Logits of all rows, in passes of cycling sizes."""
        found, at = [], 0
        while at < len(tokens):
            size = sizes[len(found) % len(sizes)]
            found.append(self.logits(at, tokens[at : at + size]))
            at += size
        return np.concatenate(found)


TOKENS = prompt_of(LENGTH, 3)
FORMS: list[dict[str, Any]] = [
    {"kv_dtype": "float32"},
    {"kv_dtype": "int8", "quantization": "int8"},
    {"kv_dtype": "bfloat16", "quantization": "int4"},
    {"kv_dtype": "fp8"},
]


PATHS = native.instruction_paths()
CASES = [("llama", path, form) for path in PATHS for form in FORMS]
CASES += [(family, PATHS[0], FORMS[1]) for family in FAMILIES if family != "llama"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "path", "form"), CASES, ids=str)
def test_rows_are_independent_of_chunks_and_threads(family: str, path: str, form: dict[str, Any]) -> None:
    def trunk(threads: int = 1) -> Trunk:
        placement = {3: ThreadPlacement(((1, 0, (0,)), (1, 0, ()), (1, 1, ())), "replicate")}.get(threads, FREE)
        return Trunk(family, NativeBackend(threads=threads, path=path, placement=placement, **form))

    alone = trunk().chunked(TOKENS, (1,))
    assert np.isfinite(alone).all()
    for sizes, threads in (((LENGTH,), 1), ((37, 2, 3), 2), ((4, 5, 6, 7, 8), 3)):
        found = trunk(threads).chunked(TOKENS, sizes)
        assert np.array_equal(found.view(np.uint32), alone.view(np.uint32)), (sizes, threads)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "path"), [*(("llama", path) for path in PATHS), *((f, PATHS[0]) for f in FAMILIES)])
def test_float_logits_match_reference(family: str, path: str) -> None:
    oracle = Trunk(family, reference_model(family).backend).logits(0, TOKENS)
    found = Trunk(family, NativeBackend(threads=1, path=path, kv_dtype="float32")).logits(0, TOKENS)
    np.testing.assert_allclose(found, oracle, atol=2e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_logits_are_close(quantization: Any) -> None:
    """Relative to the standard deviation of the logits: 8 bits within 3 %, 4 bits within a third."""
    oracle = Trunk("llama", reference_model("llama").backend).logits(0, TOKENS)
    found = Trunk("llama", NativeBackend(threads=1, quantization=quantization)).logits(0, TOKENS)
    error = np.sqrt(np.square(found - oracle).mean()) / oracle.std()
    assert error < {"int8": 0.03, "int4": 0.33}[quantization]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv_dtype"), [*((family, "bfloat16") for family in FAMILIES), ("llama", "fp8"), ("deepseek_v4", "fp8")]
)
def test_text_and_logprobs_equal_plain_decoding(family: str, kv_dtype: Any) -> None:
    """For any drafter, depth, batch, chunk size, cache and number of threads."""
    prompts = [prompt_of(length, length) for length in (1, 7, 30, 45)]
    params = [
        SamplingParams(max_tokens=24, temperature=i % 2, seed=i, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]

    def run(**settings: Any) -> list[tuple[list[int], list[float]]]:
        config = EngineConfig(
            backend="native", max_model_len=128, kv_cache_dtype=kv_dtype, **{"threads": 1, "kv_blocks": 40, **settings}
        )
        found = api.LLM(str(folder(family)), config).generate(prompts, params)
        return [(each.token_ids, [token.logprob for token in each.logprobs or ()]) for each in found]

    plain = run(drafter="none", max_num_seqs=1, enable_prefix_caching=False)
    assert all(max(tokens) < VOCAB for tokens, _ in plain)
    assert run(drafter="auto", depth=3, threads=2, max_num_batched_tokens=5) == plain
    assert run(drafter="auto", depth=5, threads=3, kv_blocks=12) == plain
    if family == "llama":
        assert run(drafter="ngram", depth=4, threads=2) == plain
        assert run(drafter="auto", depth=5, max_num_seqs=2, threads=3) == plain
