"""An agent that books a trip (`agent`), killed with SIGKILL while it works and started again (`kill_and_resume`).

`mainstay demo` runs it.
"""
