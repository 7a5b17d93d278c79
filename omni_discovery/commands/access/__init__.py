"""The commands about who may use a deployment."""
