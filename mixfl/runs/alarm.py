"""When an evaluated loss has jumped."""

from collections.abc import Sequence

RECENT = 10  # evaluations that say what is usual
FEWEST = 5  # evaluations before one that can be told to be unusual
TIMES = 3  # the range of the recent ones
PART = 0.5  # of the best


def jumped(losses: Sequence[float]) -> bool:
    """Is the last loss far above what they were before?

    It must exceed the highest of the recent ones by three times their range, and the best of all
    by half of it. The first is what noise does not do; the second leaves alone what is small,
    however unusual. A loss that stays high is not told again.
    """
    *before, last = losses
    if len(before) < FEWEST:
        return False
    recent, best = before[-RECENT:], min(before)
    usual = max(recent) - min(recent)
    return last - max(recent) > TIMES * usual and last - best > PART * abs(best)
