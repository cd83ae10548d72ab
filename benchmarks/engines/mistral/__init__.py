"""mistral.rs, by its Python package."""
