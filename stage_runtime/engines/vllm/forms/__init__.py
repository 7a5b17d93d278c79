"""Forms of answers: checked and compiled beside the engine, the clients' in turn."""
