"""What is counted over the rounds of a run."""

from collections.abc import Mapping
from typing import Any

MOST_SKIPPED = 5  # a run has failed if this many rounds are skipped at its end


def too_many(skipped: int, rounds: int) -> bool:
    """Has a run of `rounds` rounds failed, if the last ones were skipped?"""
    return skipped > 0 and (skipped >= MOST_SKIPPED or 2 * skipped >= rounds)


COUNTED = (
    "clients/rejected", "clients/clipped", "clients/asked", "clients/accepted", "clients/surplus",
    "clients/dropped", "clients/late", "clients/saturated", "replies/duplicate", "replies/missing",
    "replies/unknown", "rounds/failed", "rounds/skipped", "comm/frozen_bytes",
)  # fmt: skip


def counted(key: str) -> bool:
    """Is it added up over the rounds?"""
    return key in COUNTED or key.startswith("clients/rejected/")


def reasons(counts: Mapping[str, Any]) -> str:
    """Why clients were left out, if the engine says so: `3 late, 1 shape`."""
    start = "clients/rejected/"
    return ", ".join(
        f"{n} {k.removeprefix(start)}" for k, n in sorted(counts.items()) if k.startswith(start)
    )
