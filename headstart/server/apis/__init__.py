"""One module for each HTTP API. APIs other than OpenAI's completions translate their bodies to chat or completion
requests, and render the generation in their own format. pipeline.py prepares, runs and limits all requests."""
