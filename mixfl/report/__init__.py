"""Reports on runs: their content (document), its sources (from_runs) and output (page, markdown)."""
