"""Load balancing: the policies, and the indices that they pick replicas from."""
