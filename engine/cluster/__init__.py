"""The run over several machines. Ray is imported in this folder only, and needed by recipes with `[cluster]` only."""

from __future__ import annotations

import os

from engine.errors import InputError

# Ray reads it when it is imported. A driver under `uv run` would else upload its working directory to every node.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# How often and for how long a driver tries to join: Ray's own are 14 minutes where something else has the port.
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", "15")

try:
    import ray  # noqa: F401
except ModuleNotFoundError as missing:
    raise InputError(
        "a recipe with [cluster] needs Ray, which is not installed: pip install 'rlvr[cluster]', on every node, or "
        "leave [cluster] out to run on this machine alone"
    ) from missing
