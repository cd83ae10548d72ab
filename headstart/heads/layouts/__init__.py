"""Block drafters as others publish them, in the form of heads/block.py and back."""
