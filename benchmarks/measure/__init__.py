"""Parts that benchmarks share: prompts, machine load, turns, tables, files of random weights."""
