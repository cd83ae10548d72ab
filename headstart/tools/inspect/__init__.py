"""`headstart inspect`: what a checkpoint holds, from headers alone.

run         options -> Report
weights     the weights that tensors stand for; parts: which part of a model each belongs to
heads       native MTP modules; drafters: those that are checkpoints of their own; faults: what shapes do not say
fit         do they fit a target
state       one word for the state of the heads; findings: remarks; deep: acceptance, measured
render      the report as text
"""
