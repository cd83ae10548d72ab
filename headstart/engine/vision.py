"""`VisionEncoder`: makes the features of pictures, which replace embeddings in the trunk's rows.

A picture runs alone, so its features are a function of its pixels only. Features of recent pictures are kept, for
prompts that are computed in several passes or again after a preemption.
"""

from collections import OrderedDict
from functools import partial

import numpy as np

from headstart.core import Float32, ImageInput, StepPlan
from headstart.kernels.ops import Backend, Handle
from headstart.layers.vision import CHANNELS, VisionNetwork

MAX_BYTES = 64 * 2**20  # of kept features
BLOCK = 16  # positions of a block


class VisionEncoder:
    """A vision tower with its KV pool on a backend. One thread uses it at a time."""

    def __init__(self, backend: Backend, network: VisionNetwork) -> None:
        """Raises ModelError if the backend cannot run the tower."""
        self.backend, self.network = backend, network
        config = network.config
        pool = backend.kv_pool(-(-config.num_patches // BLOCK) * BLOCK, config.spec)
        self._encode = backend.prepare(partial(network.encode, pool=pool), hidden_width=CHANNELS * config.patch_size**2)
        self._project = backend.prepare(network.project, hidden_width=config.hidden_size)
        self._kept: OrderedDict[bytes, Float32] = OrderedDict()

    def features(self, image: ImageInput) -> Float32:
        """Rows of the trunk [num_tokens, H]."""
        if (known := self._kept.get(image.digest)) is None:
            encoded = self._run(self._encode, image.patches)
            known = self._run(self._project, self.network.pooled(encoded))
            self._kept[image.digest] = known
        self._kept.move_to_end(image.digest)
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > MAX_BYTES:
            self._kept.popitem(last=False)
        return known

    def _run(self, handle: Handle, rows: Float32) -> Float32:
        """A copy of a program's `out` for rows that all see each other."""
        count = len(rows)
        numbers = np.arange(count, dtype=np.int32)
        plan = StepPlan(
            token_ids=numbers,
            positions=numbers,
            slots=numbers,
            visible_end=np.full(count, count - 1, np.int32),
            row_starts=np.array([0, count], np.int32),
            block_tables=np.arange(-(-count // BLOCK), dtype=np.int32)[None],
            logit_rows=np.zeros(0, np.int32),
            block_size=BLOCK,
        )
        return self.backend.numpy(self.backend.run(handle, plan, hidden=self.backend.buffer(rows))["out"]).copy()
