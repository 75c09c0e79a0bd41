"""What moves between stages and what it means: leased embeddings and KV blocks, over any transport."""
