"""Exact other ways to compute the same client: rows of tables, lookups, low-rank layers."""
