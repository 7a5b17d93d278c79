"""The client of etcd, and an etcd of our own. The only folder that imports gRPC."""
