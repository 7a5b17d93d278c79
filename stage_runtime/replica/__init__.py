"""One replica process: its life, its record, its exit."""
