"""headstart: an LLM engine built around multi-token prediction."""

__version__ = "0.1.0"
