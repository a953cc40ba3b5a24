"""Processes: durable units of work, independent of any session.

service, handle, policy     what a host asks for: start, await, signal, cancel, list
visible                     the same for a call of a session, which sees only some processes
worker/                     the worker that owns processes
function/                   durable functions (`@process`)
tool/                       background tools
task                        code in the memory of one Runtime
external                    work that somebody else does
"""
