"""vLLM on a CPU: a worker in its interpreter, its drafts, and weights as it reads them."""
