"""Media as bytes and sizes: fetched, probed and named in the router, decoded on encode workers. No torch."""
