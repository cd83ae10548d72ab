"""Inputs of the fuzz tests. The suite tries a few of them; `pytest --fuzz 1000 TEST` tries a thousand times as many."""
