"""Readers of official data formats, one module per family of formats.

A `Format` yields records, in the order of its files, and turns the records of one client into
columns. `mixfl.data.prepare` collects each client's records on disk (`spill.py`), groups,
partitions and splits clients, and writes the stores.
"""
