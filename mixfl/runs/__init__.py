"""Runs: configuration, run directory, checkpoints, logging, resume."""
