"""Examples grouped by client, in memory or in a memory-mapped store; preparing and making data."""

from mixfl.data.examples import ClientData, Examples

__all__ = ["ClientData", "Examples"]
