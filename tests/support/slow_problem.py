"""The tiny problem with evaluations that take long enough to watch the run."""

import dataclasses
import time

import tiny_problem


def evaluate(params):
    time.sleep(0.05)
    return tiny_problem.evaluate(params)


problem = dataclasses.replace(tiny_problem.problem, evaluate=evaluate)
