"""Shapes of models, devices, the roofline of an engine step and its fit to this machine, for `headstart plan`."""
