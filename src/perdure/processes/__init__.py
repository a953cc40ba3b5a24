"""Processes: durable units of work, independent of any session.

    service     what a host asks for: start, await, signal, cancel, list
    handle      a process seen from outside
    visible     the same for a call of a session, which sees only some processes
    worker      owns the processes of a Runtime: claims them, gives them places, releases them
    run         one of them, as its engine sees it, with its journal
    function/   the engine of durable functions (`@process`)
    tool        the engine of background tools
    local       engines of code in the memory of one Runtime, and of work that is done outside

Engines of turns and operations are in `perdure.sessions`.
"""
