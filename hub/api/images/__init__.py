"""POST /v1/images/generations: pictures alone."""
