"""A Ray cluster of several nodes on this machine, each with an environment and a working directory of its own."""

from __future__ import annotations

import os

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SYSTEM = {
    # A dead node is found in two seconds and not in twenty.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "prestart_worker_first_driver": False,
}


class Machines:
    """Nodes by name. The first is the head, which the tests' process joins."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        self.cluster = Cluster(shutdown_at_exit=True)
        self.nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """host:port of the head."""
        return str(self.cluster.address)

    def add(self, name: str, cpus: int, gpus: int = 0, **environment: str) -> Path:
        """Start a node in a folder of its own, which is given; its environment has these variables too."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        only_head = {
            "_system_config": SYSTEM,
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,
        }
        head: dict[str, Any] = {} if self.nodes else only_head
        with contextlib.chdir(home):
            self.nodes[name] = self.cluster.add_node(
                node_name=name,
                num_cpus=cpus,
                num_gpus=gpus,
                object_store_memory=80 << 20,
                env_vars={"RAY_memory_monitor_refresh_ms": "0", **environment},
                **head,
            )
        return home

    def kill(self, name: str) -> None:
        """As if its plug were pulled."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def close(self) -> None:
        """End every node."""
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """No node yet: each module adds its own."""
    import ray

    made = Machines(tmp_path_factory.mktemp("machines"))
    yield made
    ray.shutdown()
    made.close()
