"""The simulator: who takes part and what is read, the compiled round, the loop over rounds."""

from mixfl.engine.simulator import RoundResult, Simulator
from mixfl.process.memory import keep_freed_memory

__all__ = ["RoundResult", "Simulator"]

keep_freed_memory()  # the earlier the better
