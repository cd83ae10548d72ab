"""Parts of gpu.py: what a machine with a GPU is for."""
