"""What replicas and supervisors report of themselves, and how that becomes metrics of Prometheus."""
