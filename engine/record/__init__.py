"""What a run leaves on disk and shows while it runs."""

from engine.record.adapter import export_adapter
from engine.record.console import Console
from engine.record.folder import RunFolder, create_folder
from engine.record.metrics import step_metrics
from engine.record.summary import summarise

__all__ = ["Console", "RunFolder", "create_folder", "export_adapter", "step_metrics", "summarise"]
