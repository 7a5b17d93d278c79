"""What the hot paths cost in instructions, compared with a committed baseline."""
