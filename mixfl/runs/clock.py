"""How long a round takes."""

import time


class RoundClock:
    """The mean time of a round: `with clock:` is what counts."""

    def __init__(self, start: int):
        self.restart(start)

    def restart(self, round: int) -> None:
        self.seconds, self.since = 0.0, round

    def mean_ms(self, round: int) -> float:
        return 1000 * self.seconds / (round - self.since)

    def __enter__(self) -> None:
        self.begun = time.perf_counter()

    def __exit__(self, *error) -> None:
        self.seconds += time.perf_counter() - self.begun
