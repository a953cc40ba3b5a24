"""The durable place that tests here run on."""

from tests.sessions.places import file, place

__all__ = ["file", "place"]
