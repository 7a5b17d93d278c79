"""The pipeline document (YAML): read, checked, compared. Pure but for load.py."""
