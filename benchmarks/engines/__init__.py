"""Engines as processes to measure: headstart, llama.cpp, vLLM, mistral.rs, OpenVINO GenAI."""
