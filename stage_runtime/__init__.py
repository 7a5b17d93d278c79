"""One replica and its supervisor: engines, the ZMQ server, connectors."""
