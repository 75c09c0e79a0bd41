"""From chat messages to token ids with media in their places, and from output token ids back to text. No torch."""
