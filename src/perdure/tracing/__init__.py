"""Traces: what happened when, for people who look for the cause of something."""
