"""When the evaluated loss has jumped."""

from collections.abc import Sequence

RECENT = 10  # evaluations that show what is usual
FEWEST = 5  # evaluations needed before one can be called unusual
TIMES = 3  # times the range of the recent losses
PART = 0.5  # part of the best loss


def jumped(losses: Sequence[float]) -> bool:
    """Is the last loss far above the ones before it?

    It must exceed the highest recent loss by three times the range of the recent losses, and the
    best of all by half of that best. Noise does not do the former; the latter ignores changes that
    are small, however unusual. A loss that stays high does not count again.
    """
    *before, last = losses
    if len(before) < FEWEST:
        return False
    recent, best = before[-RECENT:], min(before)
    usual = max(recent) - min(recent)
    return last - max(recent) > TIMES * usual and last - best > PART * abs(best)
