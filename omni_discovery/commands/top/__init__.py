"""``omni top``: stages and replicas, live, with one key for what an operator does to them."""
