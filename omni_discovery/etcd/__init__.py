"""The client of etcd, and the embedded etcd. The only folder that imports gRPC."""
