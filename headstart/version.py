"""The version of the package: the one place where it is written (pyproject.toml reads it)."""

from __future__ import annotations

__version__ = "0.1.0"
