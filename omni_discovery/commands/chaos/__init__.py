"""``omni chaos``: faults of replicas, drawn at random, for the operator of a staging deployment."""
