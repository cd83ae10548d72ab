"""Quantizations, one file each: `QUANTIZATION = Quantization(...)`."""
