"""Official formats: each module reads one family of them.

A `Format` gives records, in whatever order its files have them, and says how the records of
one client become columns. `mixfl.data.prepare` brings the records of a client together,
outside of memory (`spill.py`), groups, partitions and splits clients, and writes the stores.
"""
