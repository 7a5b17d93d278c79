"""TcpConnector: hand-offs between hosts, with a token for each transfer."""
