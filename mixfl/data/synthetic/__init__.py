"""Synthetic data, one generator per task: made in seconds from a seed, with a difficulty."""
