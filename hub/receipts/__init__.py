"""The receipts of one hub: what became of its requests, and which replicas each of their stages could have gone to."""
