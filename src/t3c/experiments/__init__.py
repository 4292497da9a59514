"""Comparisons anyone can make again."""
