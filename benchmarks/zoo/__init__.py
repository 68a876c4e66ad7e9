"""Seven models that people train: `python -m benchmarks.zoo`."""
