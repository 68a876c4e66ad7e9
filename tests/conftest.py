"""The stages of the tests, and what all tests share: two CPU devices, so that sharing a cohort
between devices can be tested; programs that compile quickly; a folder that keeps them.

    make test          unit tests, the reference, one run of each command; at most 5 minutes
    make test-system   kills, sweeps, distributes, opens browsers, runs Flower, examples and pages
    make test-numbers  more combinations of parameters; and tests of numbers again, with the
                       optimizations that XLA makes for users
    make test-flower   a SuperLink and SuperNodes as real processes
    make test-all      these, and what is marked slow

`.ci/run` runs all but the last. A test's stage is that of its mark (`@pytest.mark.numbers`), of its
file or of its function in the sets below. In a table of all algorithms, `make test` has the paper's
four; the others are in test-numbers.
"""

import gc
import os
import signal
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
# What a shell starts in the background ignores Ctrl-C, and so would the processes of the tests.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The outcome must not depend on the clock, nor on the day.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")
pytest.register_assert_rewrite(
    "deployed", "format_files", "layer_problem", "problems", "run_folders", "table_problem"
)

# Whole files, by stage.
SYSTEM = {
    "test_distributed", "test_exchange", "test_faults", "test_flower", "test_flower_poison",
    "test_kill", "test_members", "test_no_surprises", "test_page", "test_supervisor",
    "test_sweeps", "test_trackers", "test_tune", "test_wandb", "test_watch_page", "test_wire",
    "test_zoo",
}  # fmt: skip
NUMBERS = {
    "test_audit", "test_client_settings", "test_codes", "test_frozen", "test_participation",
    "test_native", "test_populations", "test_private_diagnosis", "test_random_losses",
    "test_turned",
}  # fmt: skip
# Repeated in test-numbers with XLA's optimizations, in tables for the paper's algorithms.
OPTIMIZED = {
    "test_against_reference", "test_clipping", "test_convolutions", "test_half", "test_loops",
    "test_losses", "test_low_rank", "test_mechanism", "test_quantize", "test_recurrence",
    "test_rewriting", "test_robust", "test_rows", "test_winograd",
}  # fmt: skip
# Of test-system, what computes much, or must be as users have it: with XLA's optimizations. The
# rest compiles many small programs, and has none.
AS_USERS = {
    "test_distributed", "test_examples", "test_export", "test_getting_started", "test_half",
    "test_kill", "test_lora_example", "test_no_surprises", "test_notebook", "test_pages",
    "test_populations", "test_private_deployments", "test_process_memory", "test_pytorch",
    "test_quickstart", "test_repeat", "test_runs", "test_site", "test_training", "test_wire",
    "test_zoo",
}  # fmt: skip
# Single functions that take long.
FUNCTIONS = {
    "system": {
        "test_a_page_trains_a_module", "test_a_page_trains_with_draws",
        "test_a_page_trains_with_privacy", "test_a_private_deployment_is_the_simulator",
        "test_a_second_run_compiles_nothing", "test_a_study_from_its_file_to_the_page",
        "test_an_example_runs", "test_config_repeats_the_run", "test_diagnose_on_the_command_line",
        "test_every_command_of_the_readme_takes_the_saved_file",
        "test_kinds_of_models_train_alike", "test_memory_stays_flat",
        "test_mixed_learns_what_federated_alone_can_not", "test_plot_command",
        "test_a_ray_cluster_loses_a_node", "test_a_job_of_submitit_is_killed",
        "test_script_is_repeated_to_the_same_bits",
    },
    "numbers": {
        "test_a_loss_that_uses_more_than_the_rows_is_refused",
        "test_a_run_keeps_its_vocabulary_and_goes_on_only_with_the_same",
        "test_adaptive_server_optimizers_agree_too",
        "test_advice_follows_what_is_known_of_the_algorithms",
        "test_called_losses_train_alike_and_are_noted",
        "test_chunks_and_devices_change_nothing", "test_chunks_and_devices_clip_alike",
        "test_fact_3_unequal_clients_leave_a_drift", "test_first_layers_are_low_rank",
        "test_low_rank_is_plain", "test_noise_is_enough_and_hardly_more",
        "test_only_the_adapters_are_sent", "test_other_settings_equal_the_reference",
        "test_padding_leaves_an_optimizer_alone_beside_an_augmenting_gradient",
        "test_rounds_are_the_same", "test_row_sparse_tables_are_clipped_alike",
        "test_rows_are_dense", "test_sparse_is_dense", "test_sparse_is_dense_on_other_problems",
        "test_sparse_is_dense_whatever_the_size_of_a_client",
        "test_the_host_gives_what_the_compiled_round_gives",
        "test_the_mean_of_many_draws_is_what_was_coded",
        "test_the_prediction_is_near_what_xla_allocates",
        "test_the_server_tells_how_far_it_is", "test_unknown_operators_are_timed_once",
        "test_weighting_by_examples_steps_and_uniform_differ",
        "test_without_noise_and_limit_it_is_the_algorithm",
    },
}  # fmt: skip
PAPERS = {"fedavg", "pt", "1wgt", "2wgt"}
# Tables of all algorithms: of others than the paper's, in test-numbers.
TABLES = {
    "test_against_reference", "test_clipping", "test_low_rank", "test_mechanism", "test_properties",
    "test_robust", "test_rows", "test_runs", "test_schedules",
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
        file, function = item.path.stem, getattr(item, "originalname", item.name)
        given = getattr(item, "callspec", None)
        algorithm = given.params.get("algorithm") if given else None
        other = file in TABLES and isinstance(algorithm, str) and algorithm not in PAPERS
        if other:
            item.add_marker("numbers")
        for stage, files in (("system", SYSTEM), ("numbers", NUMBERS), ("optimized", OPTIMIZED)):
            if stage == "optimized" and other:
                continue
            if file in files or function in FUNCTIONS.get(stage, ()):
                item.add_marker(stage)
        if file in AS_USERS and item.get_closest_marker("system"):
            item.add_marker("optimized")
