"""What shells are given: completion."""
