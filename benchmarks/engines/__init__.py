"""Engines as measured processes: headstart, llama.cpp, vLLM, OpenVINO GenAI."""
