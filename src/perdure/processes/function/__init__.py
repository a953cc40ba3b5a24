"""Durable functions: an `async def` whose calls of its context are recorded, and answered from the record on replay.

    context         `ProcessContext`: the calls that a function makes
    calls           how each is answered from the journal, or made and recorded; the attempts of a step
    scheduler       the branches of a run: which of them goes on next, what they wait for, how each is stopped
    replay          the recorded calls, and whether the code still makes the same ones
    engine          `@process`; runs a function from its first line, and says how it ended

Read `context` first, then `scheduler`.
"""
