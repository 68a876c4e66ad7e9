"""Synthetic data for each task, made in seconds from a seed and a difficulty."""
