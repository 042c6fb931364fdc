"""The part of the sync that runs inside vLLM's worker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from engine.errors import TransferError
from engine.sync.adapter import activate
from engine.sync.collective import Received
from engine.sync.install import How, Install, bind_install
from engine.sync.transport import Attached
from engine.sync.ways import attach


class WorkerExtension:
    """Mixed into vLLM's Worker (`worker_extension_cls`); its methods are called by collective RPC.

    vLLM refuses an extension whose public names the worker has already, hence the prefix.
    """

    model_runner: Any  # vLLM's, from the worker that this is mixed into
    device: torch.device  # likewise
    rank: int  # likewise, among the workers of this engine
    rlvr_model_dir: str
    rlvr_sent: Attached | Received
    rlvr_fetch_seconds: float
    rlvr_installer: Install

    def rlvr_open(self, model_dir: str) -> None:
        """Say where the base model lies; where vLLM has LoRA layers, make our adapter known to it, empty."""
        self.rlvr_model_dir = model_dir
        if hasattr(self.model_runner, "lora_manager"):
            activate(self.model_runner.lora_manager)

    def rlvr_bind(self, address: dict[str, Any], how: How) -> int:
        """Attach to the trainer's tensors and find each one's place; how many names. Raises where one has none."""
        self.rlvr_sent = attach(address, self.device)
        self.rlvr_installer = bind_install(
            how, self.model_runner, self.rlvr_model_dir, self.rlvr_sent.tensors, self.rlvr_sent.scale
        )
        return len(self.rlvr_sent.tensors)

    def rlvr_fetch(self, meeting: Mapping[str, Any] | None) -> str:
        """Take what the trainer sends or has written; why nothing came, or nothing. The model stays as it is."""
        start = time.perf_counter()
        try:
            self.rlvr_sent.fetch(meeting, self.rank)
        except TransferError as error:  # whoever asked tries again, with other members
            return str(error)
        self.rlvr_fetch_seconds = time.perf_counter() - start
        return ""

    def rlvr_install(self) -> dict[str, float]:
        """Write the fetched tensors into the model; seconds by phase."""
        start = time.perf_counter()
        self.rlvr_installer.write()
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        return {"fetch": self.rlvr_fetch_seconds, "write": time.perf_counter() - start}
