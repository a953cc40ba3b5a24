"""What Perdure is tested with, shipped and supported: use it to test your own agents."""

from perdure.providers.scripted import FunctionModel, ScriptedModel
from perdure.testing.clock import VirtualClock

__all__ = ["FunctionModel", "ScriptedModel", "VirtualClock"]
