"""Small random models of every family beside other programs: transformers' classes, and llama.cpp by its converter."""
