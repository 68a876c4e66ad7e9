"""Several runs at once: comparisons, their tables and plots, and the check of a problem."""
