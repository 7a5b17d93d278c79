"""How well the unit tests of the cores watch: small changes, one at a time, and who notices."""
