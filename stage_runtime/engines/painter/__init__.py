"""engine: diffusion, with the demo's small diffusion transformer."""
