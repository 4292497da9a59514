"""Models and data sets that only the laboratory reads."""
