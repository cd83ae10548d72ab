"""Engines as processes to measure: what all have, and a package for each with what it alone needs.

`process` and `protocol` need the standard library only: workers run in the interpreter of their engine.
"""
