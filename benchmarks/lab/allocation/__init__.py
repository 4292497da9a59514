"""Rules of allocation that are only measured: greedy, one level for all, templates, snapping."""
