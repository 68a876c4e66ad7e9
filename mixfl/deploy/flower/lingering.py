"""The record of a message that wants nothing: it keeps a node from going to sleep (asking.py)."""

LINGER = "linger"
