"""What a client's input may cost, decided before anything is spent on it."""
