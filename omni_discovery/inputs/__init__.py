"""What is decided of a client's input at hub and replica alike: what it may cost, and its seed."""
