"""Shared parts of benchmarks: prompts, machine load, turns, tables, files of random weights."""
