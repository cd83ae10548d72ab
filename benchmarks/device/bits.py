"""Bit equality of a row's logits on the device, whatever other rows are in its pass.

The rows of a text are computed in one pass each, then in chunks of many sizes, and in batches with other texts in
shuffled order. Reported: the number of rows that differ from the first computation, and by how much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from device.clock import Clock, Results, table
from headstart.core import Request, Rows, SamplingParams, Sequence
from headstart.engine.load import Model
from headstart.engine.runner import build_plan

CHUNKS = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 127, 128, 129, 512)
COMPANY = (1, 2, 7, 15, 31, 63)
BLOCK_SIZE = 16


@dataclass
class Device:
    """A trunk with KV cache for some thousand positions."""

    model: Model
    blocks: int

    def __post_init__(self) -> None:
        backend, decoder = self.model.backend, self.model.decoder
        pools = [backend.kv_pool(self.blocks * BLOCK_SIZE, spec) for spec in decoder.kv_specs]
        assert not decoder.state_specs, "the text's rows are computed in any order"
        self._handle = backend.prepare(decoder.program(pools))

    def run(self, parts: Seq[Rows]) -> np.ndarray:
        """Logits of all rows in the order of the parts."""
        backend = self.model.backend
        logits = backend.run(self._handle, build_plan(list(parts), BLOCK_SIZE))["logits"]
        return np.array(backend.numpy(logits))  # a copy, as backends reuse their buffers


def sequence(tokens: list[int], first_block: int) -> Sequence:
    request = Request(request_id="", prompt_ids=tuple(tokens), params=SamplingParams(), seed=0, stop_ids=frozenset())
    made = Sequence(request, 0, tokens, 0)
    made.block_table.extend(range(first_block, first_block - (-len(tokens) // BLOCK_SIZE)))
    return made


def part(of: Sequence, start: int, end: int) -> Rows:
    return Rows(of, start, of.tokens[start:end], end - start)


def in_chunks(device: Device, tokens: list[int], size: int) -> np.ndarray:
    of = sequence(tokens, 0)
    ends = range(0, len(tokens), size)
    return np.concatenate([device.run([part(of, at, min(at + size, len(tokens)))]) for at in ends])


def batched(device: Device, tokens: list[int], others: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """The rows one by one, each in a pass with `others` rows of other texts."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    texts = [rng.permutation(tokens).tolist() for _ in range(others)]
    company = [sequence(text, (1 + i) * blocks) for i, text in enumerate(texts)]
    own, at = sequence(tokens, 0), np.zeros(others, int)
    for place in range(len(tokens)):
        parts = [part(own, place, place + 1)]
        for i, of in enumerate(company):
            end = min(int(at[i] + rng.integers(1, 4)), len(tokens))
            if end > at[i]:
                parts.append(part(of, int(at[i]), end))
                at[i] = end
        order = rng.permutation(len(parts))
        logits = device.run([parts[i] for i in order])
        before = sum(len(parts[i].token_ids) for i in order[: int(np.flatnonzero(order == 0)[0])])
        yield logits[before : before + 1]


def compare(found: np.ndarray, first: np.ndarray) -> dict[str, Any]:
    return {
        "rows": len(found),
        "rows_that_differ": int((found != first).any(1).sum()),
        "largest_difference": float(np.abs(found - first).max()),
    }


def run(model: Model, length: int, clock: Clock, results: Results, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    low, high = 10, model.config.vocab_size - 10
    tokens = rng.integers(low, high, length).tolist()
    blocks = -(-length // BLOCK_SIZE)
    device = Device(model, blocks * (1 + max(COMPANY)))
    rows = []
    work = [("chunks of", size, lambda size=size: in_chunks(device, tokens, size)) for size in CHUNKS if size <= length]
    short = tokens[: min(length, 48)]
    work += [("beside", n, lambda n=n: np.concatenate(list(batched(device, short, n, rng)))) for n in COMPANY]
    about = {"backend": model.backend.name, "model": model.name}
    work = [each for each in work if not results.done("bits", what=each[0], count=each[1], **about)]
    first = in_chunks(device, tokens, 1) if work else np.zeros(0)
    for what, count, make in work:
        if clock.left < 0:
            break
        found = make()
        told = compare(found, first[: len(found)])
        results.add("bits", what=what, count=count, **about, **told)
        rows.append((f"{what} {count}", *told.values()))
    table(("rows of one text", "rows", "differ", "largest difference"), rows)
