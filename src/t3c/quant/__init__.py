"""Nested codes: one 8-bit code per weight, every q-bit view a prefix of its bits."""
