"""What a run leaves on disk and shows while it runs."""

from engine.record.console import Console
from engine.record.folder import RunFolder, choose_folder, create_folder
from engine.record.metrics import step_metrics
from engine.record.summary import summarise

__all__ = ["Console", "RunFolder", "choose_folder", "create_folder", "step_metrics", "summarise"]
