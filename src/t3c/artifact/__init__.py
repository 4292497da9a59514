"""The artifact: one folder a user stores, ships and trusts."""
