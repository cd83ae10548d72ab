"""llama.cpp: its server and its tools, and GGUF files for it."""
