"""A cluster of Ray with two nodes of one core each on this machine: `python -m tests.ray_nodes`.

It prints its address, removes a node for each line that it reads, and ends with its input.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main()
