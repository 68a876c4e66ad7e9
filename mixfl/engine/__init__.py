"""What runs rounds: the protocol (base.py), and the simulator that implements it."""

from mixfl.engine.base import Engine, Progress, RoundBytes, RoundResult
from mixfl.engine.simulator import Simulator

__all__ = ["Engine", "Progress", "RoundBytes", "RoundResult", "Simulator"]
