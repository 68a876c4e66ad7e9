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

# What kills, sweeps, distributes, opens browsers, or runs Flower's server in the test's process.
SYSTEM = {
    "test_distributed", "test_exchange", "test_faults", "test_flower", "test_flower_poison",
    "test_kill", "test_members", "test_page", "test_supervisor", "test_sweeps", "test_trackers",
}  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem in SYSTEM:
            item.add_marker("system")
