"""A copy of the registry that is watched: how fresh it is, and what losing many keys at once means."""
