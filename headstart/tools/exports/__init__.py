"""Layouts that a model with its head can be written in, one file each: `write(source, target, progress)` and `USE`, the
command that runs what was written."""
