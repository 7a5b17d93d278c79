"""omni serve: putting the parts of a hub together, and taking them apart."""
