"""How bytes move between workers. Knows offsets and epochs, no models and no tensors; imports no torch."""
