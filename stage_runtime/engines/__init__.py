"""Engines: each turns requests of one stage into outputs."""
