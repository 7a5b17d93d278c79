"""One leased key, kept: registration of replicas and hubs, leases, control keys, drain."""
