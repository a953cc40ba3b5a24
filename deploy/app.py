"""The application of the container: replace it by your own. `perdure worker app:runtime` runs it."""

import os

from perdure import Agent, Retention, Runtime


def runtime() -> Runtime:
    """Return a Runtime whose store is on the volume, which must be a local disk."""
    assistant = Agent(os.environ.get("MODEL", "scripted"), name="assistant")
    store = os.path.join(os.environ.get("DATA", "/data"), "agent.db")
    return Runtime(store, agents=[assistant], retention=Retention(days=90))
