"""engine: diffusion, with a pipeline of diffusers."""
