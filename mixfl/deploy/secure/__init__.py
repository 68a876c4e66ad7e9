"""Secure aggregation: a server learns the sum of its clients' vectors of integers, and no summand.

Double masking (Bonawitz et al., 2017), on a sparse graph of clients if there are many (Bell et al.,
2020). Nothing here knows a network: functions take and return bytes. SECURITY.md says against whom
it protects.

    server                                   client
                          <-- advert         fresh public keys                      client.advertise
    roster of adverts     -->
                          <-- shares         of its two seeds, sealed per neighbour     client.share
    the boxes for it      -->
                          <-- masked         vector + own mask + pairwise masks          client.mask
    the survivors         -->
                          <-- shares         survivors: own mask; others: pairwise     client.reveal
    the sum of survivors

ring.py      vectors of integers mod 2^bits: masks, sums, packing
shamir.py    shares of a seed
keys.py      key agreement, derived keys, sealed boxes; signatures by the nodes' own keys
graph.py     who is whose neighbour, and how many must stay
parts.py     the messages, and Refused
client.py    a client's steps, with a state that can be stored between them
server.py    the server's part of a round
"""
