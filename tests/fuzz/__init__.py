"""Random requests against a real deployment: no answer of 500 or more, nothing that hangs, nothing that grows."""
