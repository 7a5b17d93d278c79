"""Yuanrong's datasystem and transfer engine as connectors."""
