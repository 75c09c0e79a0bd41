"""Use without a server: `LLM` answers in the caller's own process. Called by scripts and notebooks."""
