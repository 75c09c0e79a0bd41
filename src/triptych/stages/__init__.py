"""What an encode, a prefill and a decode worker do with a request. Runs in the worker's one compute thread."""
