"""When an evaluated loss has jumped."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

RECENT = 10  # evaluations that say what is usual
FEWEST = 5  # evaluations before one that can be told to be unusual
TIMES = 8  # the usual change from one evaluation to the next
PART = 0.5  # of the best loss


def jumped(losses: Sequence[float]) -> bool:
    """Is the last loss far above what they were before?

    It must exceed all recent ones by eight times the median change from one evaluation to the
    next, and the best by half of it. The first is what noise does not do; the second leaves alone
    what is small, however unusual. A loss that stays high is not told again.
    """
    *before, last = losses
    if len(before) < FEWEST:
        return False
    recent, best = before[-RECENT:], min(before)
    usual = median(abs(b - a) for a, b in pairwise(recent))
    return last - max(recent) > TIMES * usual and last - best > PART * abs(best)
