"""Differential privacy of a client: what a run promises, and what it has spent (docs/privacy.md).

accountant.py   (epsilon, delta) of a number of rounds, and the noise for an epsilon
banded.py       correlated noise for clients that come without being sampled
config.py       what a user says (mixfl.DP), as keys of a run
rules.py        what a private run may not do, and what it does in its place
budget.py       what a run spends, round by round

The mechanism itself is an aggregation step: aggregation/private.py.
"""
