"""Durable processes: work with an event log of its own, independent of any session."""
