"""A whole cluster in one process, from one seed: shipped drivers on a virtual clock, a modelled etcd and network.

``python -m tests.simulation`` runs seeds; docs/reliability.md says what is simulated and what is not.
"""
