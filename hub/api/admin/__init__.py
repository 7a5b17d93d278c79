"""What operators may ask a hub over HTTP, at a port and with a token of their own (``--admin-port``)."""
