"""The door of a hub's HTTP ports, in front of every API: keys, TLS, and the ports of operators."""
