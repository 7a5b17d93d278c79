"""The one task that owns all requests and pools."""
