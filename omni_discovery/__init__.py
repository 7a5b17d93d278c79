"""Who exists: records, leases, the watched view, balancers and the operator's commands."""

__version__ = "0.1.0"
