"""Clients whose loss has branches, or loops of unknown length, train one by one, however small the
model is.

In a group, such a loop goes on until the slowest client is done, and all others compute in vain.
And all branches are computed, for each client. An ODE solver with steps of its own choice took 1.5
times as long in groups of six clients as one client after the other; a matrix exponential, which
has branches for small and large matrices, 4 times as long in groups of four.
"""

import jax

from mixfl.forms.base import Candidate, Form
from mixfl.forms.jaxpr import inner_names
from mixfl.randomness import batch_shapes


class OneByOne(Form):
    name = "one by one"
    alone = True


def choose(c: Candidate) -> Form | None:
    if c.platform != "cpu" or not c.algorithm.feed.clients or not c.term.here:
        return None
    try:
        jaxpr = jax.make_jaxpr(c.term.loss)(c.x, batch_shapes(c.term, c.batch)).jaxpr
    except Exception:  # the preflight says what is wrong with the loss
        return None
    names = {name for e in jaxpr.eqns for name in (e.primitive.name, *inner_names(e))}
    return OneByOne() if names & {"while", "cond"} else None
