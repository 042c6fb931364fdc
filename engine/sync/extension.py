"""The part of the sync that runs inside vLLM's worker."""

from __future__ import annotations

import time
from typing import Any

from engine.sync.install import MergedInstall
from engine.sync.transport import attach
from engine.types import Factors


class WorkerExtension:
    """Mixed into vLLM's Worker (`worker_extension_cls`); its methods are called by collective RPC.

    vLLM refuses an extension whose public names the worker has already, hence the prefix.
    """

    model_runner: Any  # vLLM's, from the worker that this is mixed into
    rlvr_model_dir: str
    rlvr_factors: Factors
    rlvr_scale: float
    rlvr_installer: MergedInstall

    def rlvr_open(self, model_dir: str) -> None:
        """Say where the base model lies."""
        self.rlvr_model_dir = model_dir

    def rlvr_bind(self, address: dict[str, Any]) -> int:
        """Map the trainer's factors and find each one's place; the number of pairs. Raises where one has none."""
        self.rlvr_factors, self.rlvr_scale = attach(address)
        self.rlvr_installer = MergedInstall(self.model_runner.get_model(), self.rlvr_model_dir, list(self.rlvr_factors))
        return len(self.rlvr_factors)

    def rlvr_install(self, version: int) -> dict[str, float]:
        """Write the factors that stand in the shared memory into the model; seconds by phase."""
        start = time.perf_counter()
        self.rlvr_installer.write(self.rlvr_factors, self.rlvr_scale)
        return {"write": time.perf_counter() - start}
