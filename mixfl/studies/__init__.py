"""Many runs: comparisons, sweeps, and the paper's studies with their claims."""
