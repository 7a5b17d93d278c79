"""How the demo models were trained and measured; not part of the wheel."""
