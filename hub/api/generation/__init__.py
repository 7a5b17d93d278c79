"""What the routes that generate have in common: bodies and their fields, running requests, usage, timings."""
