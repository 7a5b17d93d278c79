"""What a deploy document that comes from etcd may have done on a host, and what that host has to allow first."""
