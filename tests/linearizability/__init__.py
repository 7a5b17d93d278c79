"""Whether histories of concurrent operations could have happened one after the other: the search, and the models."""
