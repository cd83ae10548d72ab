"""Layouts that a model with its head can be written in."""
