"""Fuzzers: `python -m tests.fuzz --help`. A short run of each is part of the suite; commands run them for hours."""
