"""View: a watched copy of the registry, its freshness, anti-entropy, and mass losses of keys."""
