"""Durable functions: an `async def` whose calls of its context are recorded, and answered from the record on replay.

    definition      `@process`: what may be started
    context         `ProcessContext`: the calls that a function makes
    calls           what they have in common: answered from the journal, or made and recorded; waits, stops
    step            the attempts of one `ctx.step`
    scheduler       the branches of a run: which of them goes on next, and how each is stopped
    waits           the waits of branches, and when the process is parked
    replay          the recorded calls, and whether the code still makes the same ones
    timeouts        finds time limits of asyncio around a call, which no replay could repeat
    engine          runs a function from its first line, and says how it ended

Read `context` first, then `scheduler`.
"""
