"""Jobs: requests that outlive the connection, and the hub, that they came by."""
