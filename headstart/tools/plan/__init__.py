"""`headstart plan`: sizes of models, devices, a roofline model of an engine step, and its fit to this machine."""
