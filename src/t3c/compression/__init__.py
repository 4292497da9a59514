"""The door: one call from a trained model and data to the best artifact of it."""
