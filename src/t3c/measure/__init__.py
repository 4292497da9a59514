"""Measuring: latencies taken in turns on a quiet machine, energy, memory."""
