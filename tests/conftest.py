"""The stages of the tests, and what all tests share: two CPU devices, so that sharing a cohort
between devices can be tested; programs that compile quickly; a folder that keeps them.

    make test          unit tests, the reference, one run of each command; at most 5 minutes
    make test-system   marked system: kills, sweeps, distributes, opens browsers, runs Flower
    make test-numbers  the tests of numbers again, with the optimizations that XLA makes for users;
                       and those marked numbers: more combinations of parameters
    make test-flower   marked flower: a SuperLink and SuperNodes as real processes
    make test-all      these, and what is marked slow

`.ci/run` runs all but the last. These tests were in `make test` before there were other stages:

    system   test_bad_input          a full disk, as a process sees it
             test_cli                damaged programs in the cache
             test_flower_project     watchers and workers that hang or are killed
             test_pytorch            deployments
             test_runs               Ctrl-C and a second process
    numbers  test_against_reference  `steps` on all problems except an algorithm's own
             test_check              the identities on problems with other terms
             test_clipping           updates within the limits, of every algorithm;
                                     FedAvg and 1-way: with momentum, tables, low-rank layers;
                                     FedAvg: in chunks, on two devices; the limit 0.05
             test_low_rank           one local step; uniform weights
             test_robust             equal clients with FedAvg
             test_rows               1-way on the other problems
             test_simulator          the server's progress on two devices (2-way stayed)
"""

import gc
import os
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

# Compiling is most of the tests' time, and most of that is optimization, which small programs don't
# need. The processes that a test starts inherit this.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if os.environ.get("MIXFL_TESTS_OPTIMIZED") != "1":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()

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
pytest.register_assert_rewrite(
    "deployed", "format_files", "layer_problem", "problems", "run_folders", "table_problem"
)

# What kills, sweeps, distributes, opens browsers, or runs Flower's server in the test's process.
SYSTEM = {
    "test_distributed", "test_exchange", "test_faults", "test_flower", "test_flower_poison",
    "test_kill", "test_members", "test_page", "test_supervisor", "test_sweeps", "test_trackers",
}  # fmt: skip

# Tests of numbers that take long: only in their own stage.
NUMBERS = {
    "test_client_settings", "test_frozen", "test_participation", "test_populations",
    "test_random_losses",
}  # fmt: skip


def pytest_collection_finish():
    gc.freeze()  # the imported modules stay: no need to look at them at every collection


@pytest.fixture(autouse=True, scope="session")
def small_layers():
    """The layers of tests are small; `auto` takes the low-rank form as for large ones."""
    from mixfl.forms import first_layers

    before, first_layers.COPIED = first_layers.COPIED, 0
    yield
    first_layers.COPIED = before


@pytest.fixture(autouse=True, scope="module")
def bounded_memory():
    """JAX keeps every compiled program: gigabytes, by the end of a stage."""
    yield
    jax.clear_caches()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem in SYSTEM:
            item.add_marker("system")
        if item.path.stem in NUMBERS:
            item.add_marker("numbers")
