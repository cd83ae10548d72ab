"""Parts of gpu.py and kernels.py."""
