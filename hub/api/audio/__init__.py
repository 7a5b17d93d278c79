"""Sound over HTTP: its encoders, and the routes that are about sound alone."""
