"""Memories of hashed n-grams (Engram, Cheng et al. 2026): a large table of embeddings of the last tokens.

Each n-gram that ends at a row is hashed to several rows of the table, whose concatenation is e. With n residual streams
s, gates by stream and a convolution by feature whose taps lie `dilation` positions apart:

    g_k = norm(K e)_k . norm(s)_k / sqrt(H);  u_k = sigmoid(sign(g_k) sqrt(max(|g_k|, 1e-6))) V e
    s += u + silu(conv(norm(u)))

norm is of each stream by itself. Formula: transformers 5.24, `Qwen4ExpTextPLELayer`. The state of a sequence is its
last tokens and the last inputs of the convolution. DeepSeek-V4.1 has no convolution (s += u), and hashes numbers that
tokens of the same normalized text share (text/normalized.py).

Canonical tensors under a prefix: `embed_tokens.weight` [rows, width], `key_proj.weight` K [n * H, hashes * width],
`value_proj.weight` V [H, hashes * width], `{key,query,conv}_norm.weight` [n * H], `conv1d.weight` [n * H, 1, taps]
(oldest first); and NUMBERS [V, 1], which no file holds.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from headstart.core import IMAGE_ROW
from headstart.kernels.ops import Buffer, Ops, Pool, Weight
from headstart.kernels.specs import ConvSpec, NGramSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import GroupedRMSNorm
from headstart.layers.streams import repeat_streams
from headstart.layers.weights import Weights

LEAST = 1e-6  # of |g|
NUMBERS = "token_numbers"  # name of the tensor of each token's number


@dataclass(frozen=True, kw_only=True)
class NGramMemoryConfig:
    """The memory of one layer."""

    spec: NGramSpec
    rows: int  # of the table, those that no hash reaches included
    width: int  # features of one embedding
    streams: int  # residual streams
    taps: int = 0  # of the convolution; 0: there is none
    dilation: int = 1
    images: bool = False  # rows of images (IMAGE_ROW) get no addition
    normalized: tuple[int, int] | None = None  # (tokens, different numbers of them); None: a token's number is its id

    def state_specs(self, hidden: int) -> tuple[ConvSpec, ...]:
        """One state pool each: of tokens, and of the convolution's inputs."""
        tokens = ConvSpec(self.spec.longest, self.spec.longest)
        inputs = ConvSpec(self.streams * hidden, (self.taps - 1) * self.dilation + 1)
        return (tokens, inputs) if self.taps else (tokens,)

    def build(self, weights: Weights, prefix: str, hidden: int, eps: float) -> "NGramMemory":
        """Builds it from the tensors under `prefix` (no trailing dot). eps: of norms."""
        wide, features = self.streams * hidden, self.width * len(self.spec.sizes)
        spec, numbers = self.spec, None
        if self.normalized:
            stored = weights.unlisted(NUMBERS, self.normalized[0], 1).float32().reshape(-1)
            spec, numbers = replace(spec, end=int(stored[spec.end])), weights.index(lambda: stored.astype(np.int64))
        tokens, *conv = self.state_specs(hidden)

        def norm(name: str) -> GroupedRMSNorm:
            return GroupedRMSNorm(weights.get(f"{prefix}.{name}_norm.weight", wide), eps, self.streams)

        return NGramMemory(
            config=self, spec=spec, numbers=numbers, state_specs=(tokens, *conv),
            table=weights.get(f"{prefix}.embed_tokens.weight", self.rows, self.width),
            last=weights.constant(f"last {tokens.width} tokens", lambda: np.fliplr(np.eye(tokens.width)).reshape(-1)),
            key_proj=weights.linear(f"{prefix}.key_proj", wide, features),
            value_proj=weights.linear(f"{prefix}.value_proj", hidden, features),
            key_norm=norm("key"), query_norm=norm("query"), conv_norm=norm("conv") if conv else None,
            sums=Linear(weights.constant(
                f"sums of {self.streams} streams",
                lambda: np.kron(np.eye(self.streams), np.full(hidden, hidden**-0.5)),
            )),
            taps=self._taps(weights, f"{prefix}.conv1d", conv[0]) if conv else None,
            nothing=weights.zeros(hidden) if self.images else None,
        )  # fmt: skip

    def _taps(self, weights: Weights, name: str, spec: ConvSpec) -> Weight:
        kernel = weights.raw(f"{name}.weight", (spec.channels, 1, self.taps))

        def dilated() -> NDArray[np.float64]:
            taps = np.zeros((spec.width, spec.channels))
            taps[:: self.dilation] = kernel.float32().reshape(spec.channels, self.taps).T
            return taps.reshape(-1)

        return weights.constant(f"{name}.taps", dilated)


@dataclass(frozen=True)
class NGramMemory:
    """Memory of hashed n-grams, added to the residual streams; formula in the module's docstring."""

    config: NGramMemoryConfig
    spec: NGramSpec
    numbers: Weight | None  # [V] int; None: token ids
    state_specs: tuple[ConvSpec, ...]
    table: Weight
    last: Weight  # taps that put token i positions before a row into column i
    key_proj: Linear
    value_proj: Linear
    key_norm: GroupedRMSNorm
    query_norm: GroupedRMSNorm
    conv_norm: GroupedRMSNorm | None
    sums: Linear  # sums over each stream's features, divided by sqrt(H)
    taps: Weight | None
    nothing: Weight | None  # the value in rows of images

    def __call__(self, ops: Ops, streams: Buffer, token_ids: Buffer, pools: tuple[Pool, ...]) -> Buffer:
        """Streams [R, n * H] with the memory's addition. `pools`: of `state_specs`; None in training."""
        count, (tokens, *conv) = self.config.streams, self.state_specs
        own = repeat_streams(ops, ops.token_values(token_ids, self.numbers), tokens.channels)
        e = ops.embed_ngrams(self.table, ops.causal_conv(own, self.last, pools[0], tokens), self.spec)
        keys, value = self.key_norm(ops, self.key_proj(ops, e)), self.value_proj(ops, e)
        if self.nothing is not None:
            value = ops.put_where(value, token_ids, IMAGE_ROW, self.nothing)
        products = ops.activate_mul(keys, self.query_norm(ops, streams), "identity")
        gates = ops.signed_sqrt(self.sums(ops, products), LEAST)
        added = ops.sigmoid_mul(gates, repeat_streams(ops, value, count))
        if self.conv_norm is None:
            return ops.add(streams, added)
        mixed = ops.causal_conv(self.conv_norm(ops, added), self.taps, pools[1], conv[0])
        return ops.add(streams, ops.add(added, ops.activate(mixed, "silu")))


MASK = (1 << 64) - 1


def hash_factors(vocab_size: int, longest: int, seed: int) -> tuple[int, ...]:
    """Odd factors below 2^63 / vocab_size, from SplitMix64 (Steele, Lea, Flood 2014)."""
    bound = max(1, ((1 << 63) - 1) // vocab_size // 2)
    return tuple(2 * (_split_mix(seed + (i + 1) * 0x9E3779B97F4A7C15) % bound) + 1 for i in range(longest))


def _split_mix(state: int) -> int:
    x = (state + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


@cache
def primes_from(first: int, count: int) -> tuple[int, ...]:
    """The `count` least primes of `first` or more."""
    numbers = (each for each in itertools.count(max(first, 2)) if all(each % i for i in range(2, math.isqrt(each) + 1)))
    return tuple(itertools.islice(numbers, count))
