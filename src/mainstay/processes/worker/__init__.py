"""The worker that owns processes: what has to be known about owning one, whatever its kind.

    worker      claims processes, gives them places to run, reconciles them with the store, releases them
    run         one process that is owned here, as its engine sees it, and what others write about it
    journal     the unwritten tail of its records and events
    watch       finds processes whose owner died, whose time has come, or that other Runtimes wrote about
    waiters     who in this Runtime waits for a process
    host        what engines ask of the worker

How one process runs is up to its engine: `processes.function`, `processes.tool`, `processes.task`,
`processes.external`, and the turns of subagents in `mainstay.sessions`.
"""
