"""Factorizations of weights, as pure functions on tensors: every prefix of ranks is usable."""
