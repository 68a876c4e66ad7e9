"""Reports of runs: what they hold (document), where it comes from (from_runs), and how it is
written (page: HTML, markdown)."""
