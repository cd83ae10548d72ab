"""The cuda backend's sampler: noise, tokens and logprobs equal `reference` bit for bit, and so `native`."""

from typing import Any

import numpy as np
import pytest
import torch
from test_sampling import entry, sequence

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from headstart.core import NOT_FINITE, NOTHING_LEFT  # noqa: E402
from headstart.engine.sampling import build_rows  # noqa: E402
from headstart.kernels import philox  # noqa: E402
from headstart.kernels.cuda.kernels.sampling import gumbel  # noqa: E402
from headstart.kernels.reference.sampling import logprobs as reference_logprobs, sample  # noqa: E402

pytestmark = pytest.mark.slow


@triton.jit
def noise(ids, at, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, gumbel(tl.load(ids + i), tl.load(at), tl.load(at + 1), tl.load(at + 2)))


WIDTH, VOCAB = 131, 400

PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "seed": 2**63 + 5},
    {"temperature": 1.0, "logit_bias": {3: 5.0, 7: -100.0, 130: 2.0}, "output": (4, 5, 4)},
    {"temperature": 0.6, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3,
     "output": (9, 9, 12, 1)},
    {"temperature": 0.0, "repetition_penalty": 0.7, "top_k": 3, "output": (9, 30)},
    {"temperature": 1.5, "top_p": 0.3, "top_k": 200},
)  # fmt: skip


def random_logits(seed: int, ties: bool) -> np.ndarray:
    made = np.random.default_rng(seed).standard_normal((len(PARAMS), WIDTH)).astype(np.float32) * 2
    return np.round(made) if ties else made


def rows_of(seed: int, allowed: np.ndarray | None = None) -> Any:
    return build_rows([entry(sequence(**{"seed": seed + i, **each})) for i, each in enumerate(PARAMS)], allowed=allowed)


@pytest.mark.parametrize(
    ("ties", "mapped", "masked"), [(False, False, False), (True, True, False), (True, False, True), (False, True, True)]
)
def test_tokens_match_reference(ties: bool, mapped: bool, masked: bool, cuda: Any) -> None:
    """All sampling parameters, with pairs of ties, reduced vocabulary and mask."""
    rng = np.random.default_rng(3)
    ids = np.sort(rng.permutation(VOCAB)[:WIDTH]) if mapped else None
    tokens = None if ids is None else torch.from_numpy(ids)
    allowed = rng.integers(0, 2**32, (len(PARAMS), -(-VOCAB // 32)), dtype=np.uint32) if masked else None
    logits, rows = torch.from_numpy(random_logits(1, ties)), rows_of(100, allowed)
    size = VOCAB if mapped else WIDTH
    wanted = sample(logits, rows, tokens, size)
    found = cuda.sample(
        logits.to(cuda.torch_device), rows, vocab_size=size, token_ids=None if ids is None else cuda.index(ids)
    )
    assert found.tokens.tolist() == wanted.tokens.tolist() and found.failures == wanted.failures


def test_cutoffs_keep_the_lowest_ids_of_equal_logits(cuda: Any) -> None:
    """A cutoff one token off would change the samples of some rows."""
    limits = ({"top_k": 2}, {"top_p": 3.5 / 16}, {"top_k": 4, "top_p": 0.5})
    sequences = [sequence(seed=i, temperature=1.0, **limits[i % 3]) for i in range(30)]
    logits, rows = torch.zeros(30, 16), build_rows([entry(each) for each in sequences])
    found = cuda.sample(logits.to(cuda.torch_device), rows, vocab_size=16).tokens
    assert found.tolist() == sample(logits, rows, None, 16).tokens.tolist()
    assert [max(found[i::3]) for i in range(3)] == [1, 3, 1]


def test_failing_rows_do_not_affect_others(cuda: Any) -> None:
    logits = torch.from_numpy(random_logits(1, False))
    logits[1], logits[3, 5], logits[5, 5] = -torch.inf, torch.nan, torch.inf
    found = cuda.sample(logits.to(cuda.torch_device), rows_of(5), vocab_size=WIDTH)
    assert found.failures == {1: NOTHING_LEFT, 3: NOT_FINITE, 5: NOT_FINITE}
    assert found.tokens.tolist() == sample(logits, rows_of(5), None, WIDTH).tokens.tolist()


def test_positions_and_penalties_include_drafted_tokens(cuda: Any) -> None:
    """Sampling the next token of a draft on the device equals sampling with rows rebuilt on the host."""
    from headstart.kernels.cuda.sampling import DeviceSamplingRows

    sequences = [sequence(**{"seed": i, **each}) for i, each in enumerate(PARAMS)]
    drawn = torch.full((len(PARAMS), 3), -1, dtype=torch.int64, device=cuda.torch_device)
    known = DeviceSamplingRows.of(build_rows([entry(each) for each in sequences]), cuda.torch_device)
    for number in range(3):
        logits = torch.from_numpy(random_logits(number, True))
        prefixes = drawn[:, :number].tolist()
        cuda.sampler.draw(logits.to(cuda.torch_device), known, None, drawn, number)
        rows = build_rows([entry(each, prefix) for each, prefix in zip(sequences, prefixes, strict=True)])
        assert drawn[:, number].tolist() == sample(logits, rows, None, WIDTH).tokens.tolist()


def test_logprobs_match_reference(cuda: Any) -> None:
    logits, tokens = torch.from_numpy(random_logits(2, False)), np.arange(len(PARAMS)) * 7
    wanted = [each.logprob for each in reference_logprobs(logits, tokens, np.zeros(len(tokens), np.int64))]
    found = torch.zeros(len(tokens), 2, device=cuda.torch_device)
    drawn = torch.from_numpy(np.stack((tokens + 1, tokens), axis=1)).to(cuda.torch_device)
    cuda.sampler.logprobs(logits.to(cuda.torch_device), drawn, None, found, 1)
    assert not found[:, 0].any()
    found = found[:, 1]
    assert found.tolist() == wanted


def test_noise_equals_numpy(cuda: Any) -> None:
    """Bit for bit, for large ids and positions as well."""
    ids = np.r_[np.arange(200), np.arange(200_000, 200_056)]
    for seed, position, choice in ((0, 0, 0), (2**64 - 3, 70_000, 3), (123456789012345, 5, 1)):
        at = np.array([seed, position, choice], np.uint64).view(np.int64)
        given = [torch.from_numpy(each).to(cuda.torch_device) for each in (ids.astype(np.int32), at, np.zeros(256))]
        noise[(1,)](*given, COUNT=256, enable_fp_fusion=False)
        assert np.array_equal(given[2].cpu().numpy(), philox.numpy_gumbel(ids, seed, position, choice, philox.TOKEN))
