"""Measure what layer points and profiles take on a device, and carry it over to others."""
