"""What Mainstay is tested with, shipped and supported: use it to test your own agents."""

from mainstay.providers.scripted import FunctionModel, ScriptedModel
from mainstay.testing.clock import VirtualClock

__all__ = ["FunctionModel", "ScriptedModel", "VirtualClock"]
