"""What stands in etcd, as data: keys, records, control wishes, beats. Pure."""
