"""How a process lives, pure: what its events make of its record (`fold`), and what may happen next (`decide`)."""
