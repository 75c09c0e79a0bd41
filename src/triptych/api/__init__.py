"""The HTTP edge of the router process: OpenAI-compatible requests in, answers and streams out."""
