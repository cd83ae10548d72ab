"""Parts of verify_families.py: small random models against transformers, llama.cpp and the reference backend."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "contract")]
