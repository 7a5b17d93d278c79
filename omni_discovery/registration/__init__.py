"""Registration of replicas and hubs: leases, leased keys, control keys, acknowledgement of drains."""
