"""What happened, and how long it took: metrics, the timeline of one request, log lines."""
