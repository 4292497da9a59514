"""How far a profile's outputs are, and can be, from the original's."""
