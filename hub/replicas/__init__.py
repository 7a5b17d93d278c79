"""The connections to replicas: one client and one session each."""
