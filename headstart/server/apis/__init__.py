"""APIs beside OpenAI's completions. Each is a translation: its body to the one of /v1/chat/completions, and what comes
back to its own objects. Nothing here prepares, runs or limits a request by itself."""
