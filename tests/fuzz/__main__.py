"""Fuzzers as commands.

python -m tests.fuzz server --minutes 60          grammars and raw HTTP at once, with a monitor
python -m tests.fuzz server --only wire --seed 3 --number 17   one input again
python -m tests.fuzz configs --family llama --count 200 --gguf  random configurations against transformers
python -m tests.fuzz constraints --minutes 10                 grammars and schemas compiled and walked, no server
python -m tests.fuzz checkpoints --count 2000                 mutated files: no broken head is ALIVE
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "server")]  # for `support` and `process`, as pytest has them
KINDS = ("server", "configs", "constraints", "checkpoints")


def main() -> int:
    """Each kind is a module with `add_arguments(parser)` and `run(arguments) -> exit code`."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kind", choices=KINDS)
    kind = parser.parse_args(sys.argv[1:2]).kind
    module = importlib.import_module(f"tests.fuzz.{kind}")
    own = argparse.ArgumentParser(prog=f"python -m tests.fuzz {kind}", description=module.__doc__)
    own.formatter_class = argparse.RawDescriptionHelpFormatter
    module.add_arguments(own)
    return int(module.run(own.parse_args(sys.argv[2:])))


if __name__ == "__main__":
    sys.exit(main())
