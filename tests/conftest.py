"""Two CPU devices for all tests, so that sharing a cohort between devices can be tested."""

import os

import jax

jax.config.update("jax_num_cpu_devices", 2)
os.environ.setdefault("MIXFL_PLAIN", "1")
