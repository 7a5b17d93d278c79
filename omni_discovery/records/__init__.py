"""The keys and values of the registry, as data: keys, records, control keys, beats. Pure."""
