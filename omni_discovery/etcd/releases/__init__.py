"""Releases of etcd: which one a server is, what it does wrong, and what its users can do that they should not."""
