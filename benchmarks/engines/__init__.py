"""Engines as processes to measure: headstart, llama.cpp, vLLM, OpenVINO GenAI."""
