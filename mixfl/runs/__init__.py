"""Runs: plan, loop, run folder, checkpoints, sinks."""
