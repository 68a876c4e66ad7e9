"""Two CPU devices for all tests, so that sharing a cohort between devices can be tested; and a
folder that keeps compiled programs, which are most of the tests' time."""

import os
from pathlib import Path

import jax
from hypothesis import HealthCheck, settings

CACHE = Path(__file__).parent.parent / ".pytest_cache" / "programs"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_num_cpu_devices", 2)
# The outcome must not depend on the clock, nor on the day.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")
