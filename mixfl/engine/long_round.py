"""How far a long round is, for the user."""

from dataclasses import dataclass

from mixfl.engine.base import Progress


@dataclass
class LongRound:
    """How far a long round is."""

    round: int
    chunks: int = 0  # of batches at the server
    clients: int = 0
    chunks_done: int = 0
    clients_done: int = 0

    def progress(self) -> Progress:
        shares, words = [], []
        if self.clients:
            shares.append(self.clients_done / self.clients)
            words.append(f"{self.clients_done} of {self.clients} clients")
        if self.chunks:
            shares.append(self.chunks_done / self.chunks)
            words.append(f"{self.chunks_done} of {self.chunks} batches at the server")
        return Progress(self.round, sum(shares) / len(shares), ", ".join(words))
