"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that drafts several tokens in one pass.

Its rows are the pairs of an EAGLE-3 head, the last of which drafts the first token, then rows that draft the further
ones: the embedding of a mask token, and `mask_hidden` [taps x H] in place of the trunk's streams. All are causal.
vllm-project/speculators `models/peagle/core.py`; vLLM 0.33, `spec_decode/peagle/speculator.py`.

Published directories are those of EAGLE-3 (heads/eagle3.py) with `mask_hidden` [1, 1, taps x H]; the mask token is
`mask_token_id` (speculators), `ptd_token_id` or `pard_token` (vLLM). Depth: speculators' `speculative_tokens`, or 8.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.sizes import Sizes
from headstart.heads import eagle3
from headstart.heads.kind import HeadCheckpoint, HeadKind
from headstart.heads.published import DeclaredShapes, Document, Present


def read(document: Document, tensors: Mapping[str, Tensor], path: Path) -> HeadCheckpoint:
    if eagle3.MASK not in map(eagle3.canonical, tensors):
        raise ModelError(f"{path} holds no {eagle3.MASK}", "is this a P-EAGLE head? download it again")
    return eagle3.read(document, tensors, path)


def tensors(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    mask = {} if index else {eagle3.MASK: (1, 1, s["taps"] * s["target_hidden"])}
    return eagle3.tensors(s, index, present) | mask


PEAGLE = replace(
    eagle3.EAGLE3, key="peagle", title="P-EAGLE", read=read, tensors=tensors,
    speculators=("peagle",), gguf=(), architectures=("peagle",), keys=(), markers=(eagle3.MASK,),
)  # fmt: skip
HEAD = HeadKind(title="P-EAGLE", modules=eagle3.modules, fit=eagle3.fit, drafter="block", formats=(PEAGLE,))
