"""What several benchmarks share: questions, prompts, other processes' load, turns, tables."""
