"""What is shown of an artifact: parity, drift, bounds, and the data they rest on."""
