"""Layouts that a model with its head can be written in, one file each: `plan(request)` decides and checks everything.
Files that start with _ serve all of them."""
