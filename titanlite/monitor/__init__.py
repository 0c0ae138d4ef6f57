"""What a run tells of itself: console, metrics.jsonl, TensorBoard."""

from titanlite.monitor.metrics import Meter
from titanlite.monitor.monitor import Monitor

__all__ = ["Meter", "Monitor"]
