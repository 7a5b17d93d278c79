"""Mooncake's store and transfer engine as connectors."""
