"""Would it pay to divide a population in two? The paper's conclusion suggests it: sigma falls, G
and B rise."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mixfl.errors import MixflError
from mixfl.measure.dissimilarity import dissimilarity
from mixfl.measure.gradients import Gradients, column_mean
from mixfl.problem import Params, Problem
from mixfl.settings import Settings

EXPLAINED, GONE = 0.5, 0.2  # it pays above these shares of sigma_f^2 and of the cohort's noise


class Split(NamedTuple):
    population: str
    column: str
    explained: float  # share of sigma_f^2 that the two groups' means explain
    noise: float  # share of the cohort's noise that would disappear
    g2: float  # with two populations in place of one
    pays: bool


def check_column(problem: Problem, column: str) -> None:
    for term in problem.populations:
        if column not in term.examples.columns:
            raise MixflError(
                f"the data of '{term.name}' has no column '{column}': it has "
                f"{', '.join(term.examples.columns)}."
            )


def split(
    problem: Problem, s: Settings, j: int, column: str, x: Params, rounds: Iterable[int]
) -> Split:
    """Divides the clients of term j at the median of their mean of the column. Measured at x, on
    the cohorts of the given rounds."""
    term = problem.terms[j]
    measure = Gradients(problem, s, 2, divided_by=column)
    population, threshold = problem.populations.index(term), None  # type: ignore[arg-type]
    explained, totals, noises, g2s = [], [], [], []
    for t in rounds:
        if threshold is None:
            cohort = measure.simulator.feeder.pieces(measure.algorithm, t)
            feeds = [feed for p in cohort for feed in p.clients[population]]
            real = [feed.batches.mask.any((1, 2)) for feed in feeds]  # others are empty places
            means = [np.asarray(column_mean(feed.batches, column)) for feed in feeds]
            values = [mean[there] for mean, there in zip(means, real, strict=True)]
            threshold = float(np.median(np.concatenate(values)))
        terms = measure.at(x, t, threshold=threshold).terms
        figures = terms[j]
        if figures.upper is None or not 0 < figures.share < 1:
            continue
        share, upper = figures.share, figures.upper
        lower = (figures.gradient - share * upper) / (1 - share)
        # The variance of a client's mean of two batches. Even two random groups would differ, by
        # the noise of their means.
        noise = figures.between + figures.v / (2 * s.client_batch)
        apart = share * (1 - share) * float(np.sum((upper - lower) ** 2))
        explained.append(apart - noise / s.cohort_size)
        totals.append(figures.between)
        noises.append(noise)
        others = [k for k in range(len(terms)) if k != j]
        g2, _ = dissimilarity(
            [share * upper, (1 - share) * lower, *(terms[k].gradient for k in others)],
            [share * term.weight, (1 - share) * term.weight,
             *(problem.terms[k].weight for k in others)],
        )  # fmt: skip
        g2s.append(float(g2))
    if not explained:
        raise MixflError(
            f"the clients of '{term.name}' are alike in '{column}': there is nothing to divide."
        )
    gain = max(float(np.mean(explained)), 0.0)
    part = gain / max(float(np.mean(totals)), gain, 1e-30)
    gone = gain / max(float(np.mean(noises)), 1e-30)
    pays = part > EXPLAINED and gone > GONE
    return Split(term.name, column, part, gone, float(np.mean(g2s)), pays)
