"""The simulator: who takes part and what is read, the compiled round, the loop over rounds."""

from mixfl.engine.simulator import RoundResult, Simulator

__all__ = ["RoundResult", "Simulator"]
