"""PyTorch modules in the simulator against a plain PyTorch loop: `python -m benchmarks.modules`."""
