"""omni serve: flags, plan, dry run, and the start and stop of a hub with its local stages."""
