"""What happens between a client's summand and the server's sums (see base.py).

clipping.py   no client moves the model much further than clients usually do
private.py    differential privacy: every client is clipped, and the sum gets noise
quantize.py   fewer bytes: clients send whole numbers of a few bits (codes.py), which add up
robust.py     centers other than the mean, which compare the clients' summands
"""

from mixfl.aggregation import clipping, private, quantize
from mixfl.aggregation.base import Chain, Step
from mixfl.settings import Settings

# In the order in which they are applied. A new step is a line here.
CHOOSE = (quantize.choose, clipping.choose, private.choose)


def chain(s: Settings) -> Chain:
    """The steps that the settings ask for: first those at the client, as in a deployment, where the
    last one makes codes."""
    steps = [step for choose in CHOOSE if (step := choose(s)) is not None]
    return Chain(sorted(steps, key=lambda step: (not step.at_client, step.coder)))


__all__ = ["CHOOSE", "Chain", "Step", "chain"]
