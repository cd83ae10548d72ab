"""The version of the package: the one place where it is written (pyproject.toml reads it)."""

__version__ = "0.1.0"
