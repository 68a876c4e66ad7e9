"""A Ray cluster of two nodes, in a process without JAX, whose threads forbid to fork.

It prints the address. A line of input kills the second node. The end of the input ends the cluster.
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    size = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    node = cluster.add_node(**size)
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(node, allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main()
