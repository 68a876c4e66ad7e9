"""What secure aggregation costs: bytes against unmasked codes, and time per client.

    python -m benchmarks.secure [--clients 3,10,30,100,300,1000] [--numbers 100000,1000000] [--json]

All clients run in this process, one after the other, so a client's time is its own. Few of them are
timed; the server's time is that of the whole round. A twentieth of the clients drops out after it
has shared. Bytes are those of what the protocol sends, without Flower's own headers. The sum is
compared, bit for bit.
"""

import argparse
import json
import statistics
import time

import numpy as np

from mixfl.deploy.secure import client, ring
from mixfl.deploy.secure.server import Round

BROADCAST = b"digest"


def measured(n: int, numbers: int, bits: int = 32) -> dict[str, float]:
    layout = (ring.Segment(bits, numbers), ring.Segment(64, 16))
    generator = np.random.default_rng(0)
    vector = [generator.integers(0, 2**s.bits, s.length, s.dtype) for s in layout]
    times: dict[str, list[float]] = {"client": [0.0] * n, "server": [0.0]}
    up, down = 0, 0

    def timed(name: str, i: int, what):
        begun = time.process_time()
        found = what()
        times[name][i] += time.process_time() - begun
        return found

    states, adverts = [], []
    for i in range(n):
        state, advert = timed("client", i, lambda: client.advertise(client.State("run")))
        states.append(state)
        adverts.append(advert)
    up += 64
    order = sorted(range(n), key=lambda i: adverts[i].seal)  # as in a roster
    states, adverts = [states[i] for i in order], [adverts[i] for i in order]
    server = timed("server", 0, lambda: Round("run", 0, adverts))
    for i in range(n):
        roster = server.roster(i)
        states[i], boxes = timed("client", i, lambda i=i, r=roster: client.share(states[i], r))
        timed("server", 0, lambda i=i, b=boxes: server.take_boxes(i, b))
    up, down = up + len(boxes), down + len(roster)
    messages = timed("server", 0, lambda: server.deliver(layout, BROADCAST))
    dropped = set(range(0, n, 20)) if n >= 20 else set()
    alive = [i for i in range(n) if i not in dropped]
    for i in alive:
        states[i] = timed("client", i, lambda i=i: client.receive(states[i], messages[i]))
        states[i], masked = timed(
            "client", i, lambda i=i: client.mask(states[i], 0, BROADCAST, layout, vector)
        )
        timed("server", 0, lambda i=i, m=masked: server.take_masked(i, m))
    up, down = up + len(masked), down + len(messages[alive[0]])
    request = server.survivors()
    for i in alive:
        states[i], shares = timed("client", i, lambda i=i: client.reveal(states[i], request))
        timed("server", 0, lambda i=i, s=shares: server.take_revealed(i, s))
    up, down = up + len(shares), down + len(request)
    total = timed("server", 0, server.unmask)
    for t, v, s in zip(total, vector, layout, strict=True):
        wanted = np.multiply(v, len(alive), dtype=s.dtype) & s.dtype.type((1 << s.bits) - 1)
        np.testing.assert_array_equal(t, wanted)
    plain = ring.size(layout)
    return {
        "clients": n, "numbers": numbers, "bits": bits, "plain_bytes": plain, "up_bytes": up,
        "down_more_bytes": down, "up_ratio": up / plain,
        "client_ms": 1e3 * statistics.median(times["client"][i] for i in alive),
        "server_ms": 1e3 * times["server"][0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="3,10,30,100,300,1000")
    parser.add_argument("--numbers", default="100000,1000000")
    parser.add_argument("--most", type=float, default=3e9, help="numbers x masks, above: left out")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not given.json:
        print(f"{'clients':>8} {'numbers':>9} {'up / plain':>10} {'more up':>9} {'more down':>9} "
              f"{'client ms':>9} {'server ms':>10}")  # fmt: skip
    for numbers in map(int, given.numbers.split(",")):
        for n in map(int, given.clients.split(",")):
            if numbers * n * min(n, 101) > given.most:
                continue
            row = measured(n, numbers)
            if given.json:
                print(json.dumps(row), flush=True)
                continue
            more = row["up_bytes"] - row["plain_bytes"]
            print(f"{n:8} {numbers:9} {row['up_ratio']:10.4f} {more:9.0f} "
                  f"{row['down_more_bytes']:9.0f} {row['client_ms']:9.1f} {row['server_ms']:10.1f}",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
