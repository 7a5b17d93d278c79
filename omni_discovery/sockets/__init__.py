"""Sockets that clients reach by a name of this host."""
