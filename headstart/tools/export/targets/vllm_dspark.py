"""A block drafter with a Markov head in DSpark's layout, for vLLM and SGLang."""

from headstart.heads.layouts.writing import as_dspark
from headstart.tools.export.blocks import block_export

EXPORT = block_export(as_dspark, "dspark")
