"""Training where the data really stays with clients."""
