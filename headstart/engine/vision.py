"""`VisionEncoder`: makes the features of images, which replace embeddings in the trunk's rows.

An image runs alone, so its features are a function of its pixels only. Features of recent images are kept, for
prompts that are computed in several passes or again after a preemption.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headstart.core import Float32, ImageInput, Int32, StepPlan
from headstart.kernels.ops import Backend, Handle
from headstart.layers.vision import VisionNetwork, patch_places, windows

MAX_BYTES = 64 * 2**20  # of kept features
BLOCK = 16  # positions of a block
MIN_SLOTS = 1024  # of the KV pool, which grows with the images


@dataclass(frozen=True)
class _Programs:
    """Prepared programs of a tower over a KV pool of `num_slots` slots."""

    num_slots: int = 0
    embed: Handle = None
    stages: list[Handle] = field(default_factory=list)
    mergers: list[Handle] = field(default_factory=list)


class VisionEncoder:
    """A vision tower with its KV pool on a backend. One thread uses it at a time."""

    def __init__(self, backend: Backend, network: VisionNetwork) -> None:
        """Raises ModelError if the backend cannot run the tower."""
        self.backend, self.network = backend, network
        self._stages = network.stages
        self._programs = _Programs()
        self._reserve(MIN_SLOTS)
        self._features: OrderedDict[bytes, Float32] = OrderedDict()  # digest -> features, least recently used first

    def features(self, image: ImageInput) -> Float32:
        """Rows of the trunk [num_rows, H], with deep mergers those for its first layers beside them."""
        if (known := self._features.get(image.digest)) is None:
            known = self._features[image.digest] = self._encode(image)
        self._features.move_to_end(image.digest)
        while len(self._features) > 1 and sum(each.nbytes for each in self._features.values()) > MAX_BYTES:
            self._features.popitem(last=False)
        return known

    def max_bytes(self, max_patches: int) -> int:
        """Largest memory in bytes: the KV pool for an image of `max_patches` patches, and kept features."""
        return _pool_slots(max_patches) * self.backend.kv_bytes(self.network.config.spec) + MAX_BYTES

    def _reserve(self, num_slots: int) -> None:
        """Prepares the programs over a larger pool if this one has fewer slots."""
        if num_slots <= self._programs.num_slots:
            return
        num_slots = _pool_slots(num_slots)
        self._programs = _Programs()  # frees the pool before the next one
        network, prepare, config = self.network, self.backend.prepare, self.network.config
        pool = self.backend.kv_pool(num_slots, config.spec)
        run = partial(network.run, pool=pool)
        self._programs = _Programs(
            num_slots,
            prepare(network.embed, hidden_width=config.patch_width),
            [prepare(partial(run, stage=stage), hidden_width=config.hidden_size) for stage in self._stages],
            [prepare(each.project, hidden_width=config.merged_width(each.config)) for each in network.mergers],
        )

    def _encode(self, image: ImageInput) -> Float32:
        network, config = self.network, self.network.config
        size, num_tokens = config.merge**2, image.num_tokens
        groups = windows(image.grid, config.window) if config.window else [np.arange(num_tokens, dtype=np.int32)]
        tokens = np.concatenate(groups)
        places = patch_places(image.grid, config.merge)
        present: NDArray[np.bool] = np.all(places < np.array(image.patch_grid), axis=1)
        places = places[present]
        wanted = (tokens[:, None] * size + np.arange(size)).reshape(-1)  # patches of each token in the order of groups
        filled = np.flatnonzero(present[wanted])  # those that exist
        patches = (np.cumsum(present) - 1)[wanted[filled]]
        axes = np.concatenate((np.zeros((len(places), 1), np.int32), places), 1)[patches]
        sizes = [int(present.reshape(-1, size)[each].sum()) for each in groups]
        whole, local = _plan([len(places)], axes), _plan(sizes, axes)
        self._reserve(max(BLOCK * int(plan.block_tables.max() + 1) for plan in (whole, local)))
        x = self._run(self._programs.embed, image.patches, whole)["out"]
        if network.positions is not None:
            x = x + network.position_rows(places, image.patch_grid)
        x = x[patches]
        features = np.empty((num_tokens, len(network.mergers) * config.out), np.float32)
        for stage, program in zip(self._stages, self._programs.stages, strict=True):
            outputs = self._run(program, x, local if stage.is_windowed else whole)
            x = outputs["out"]
            if (number := stage.merger) is not None:
                whole_tokens = np.zeros((num_tokens * size, x.shape[1]), np.float32)  # 0 for patches that are missing
                whole_tokens[filled] = outputs.get("merged", x)
                rows = network.mergers[number].side_by_side(whole_tokens, size)
                merged = self._run(self._programs.mergers[number], rows, _plan([num_tokens]))["out"]
                features[tokens, number * config.out : (number + 1) * config.out] = merged
        return features if image.order is None else np.concatenate((features, *network.learned))[image.order]

    def _run(self, handle: Handle, rows: Float32, plan: StepPlan) -> dict[str, Float32]:
        """Copies of a program's results."""
        hidden = self.backend.buffer(np.ascontiguousarray(rows))
        return {name: self.backend.numpy(x).copy() for name, x in self.backend.run(handle, plan, hidden=hidden).items()}


def _pool_slots(num_slots: int) -> int:
    """Slots of a KV pool that holds at least `num_slots`: a power of two, so that similar images share a pool."""
    return 1 << (max(num_slots, MIN_SLOTS) - 1).bit_length()


def _plan(sizes: Seq[int], axes: Int32 | None = None) -> StepPlan:
    """Rows of groups of these sizes; the rows of a group see each other. axes: rotary positions [R, 3]."""
    blocks = [-(-size // BLOCK) for size in sizes]
    tables = np.zeros((len(sizes), max(blocks)), np.int32)
    for i, first in enumerate(np.cumsum([0, *blocks[:-1]])):
        tables[i, : blocks[i]] = np.arange(first, first + blocks[i])
    positions = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    return StepPlan(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slots=np.repeat(tables[:, 0] * BLOCK, sizes).astype(np.int32) + positions,
        visible_end=np.repeat(np.array(sizes, np.int32) - 1, sizes),
        row_starts=np.cumsum([0, *sizes]).astype(np.int32),
        block_tables=tables,
        logit_rows=np.zeros(0, np.int32),
        block_size=BLOCK,
        rope_positions=axes,
    )
