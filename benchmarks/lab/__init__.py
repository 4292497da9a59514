"""Measure what the documentation claims: benchmarks, ablations, and methods to compare with."""
