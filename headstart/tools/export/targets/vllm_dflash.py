"""A block drafter in DFlash's layout, for vLLM, SGLang and llama.cpp's converter."""

from headstart.heads.layouts.writing import as_dflash
from headstart.tools.export.blocks import block_export

EXPORT = block_export(as_dflash, "dflash")
