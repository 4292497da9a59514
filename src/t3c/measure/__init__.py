"""Measuring: latency quantiles with intervals, candidates taken in turns."""
