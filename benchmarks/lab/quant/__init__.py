"""Quantizers that are measured here and not shipped."""
