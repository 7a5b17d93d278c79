"""Pictures as requests: what may be asked for, which are drawn together, and the thread that draws them."""
