"""Engines: what turns one stage request into outputs."""
