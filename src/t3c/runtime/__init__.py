"""Running an artifact: engines, choice of a profile, switching. Needs no torch."""
