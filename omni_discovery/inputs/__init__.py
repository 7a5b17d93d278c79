"""What is decided of a client's input at hub and replica alike: its cost, its seed, and how long answers are read."""
