"""Receipts: what became of a request in a hub, and which replicas each of its stages could have gone to."""
