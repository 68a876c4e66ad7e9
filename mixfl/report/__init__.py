"""Reports on runs: their content (document, from_runs) and output (page, markdown, plots)."""
