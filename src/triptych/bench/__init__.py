"""The ruler: loads any OpenAI-compatible URL and compares systems. HTTP and /proc only; knows nothing of the engine."""
