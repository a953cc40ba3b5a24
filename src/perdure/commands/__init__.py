"""Commands: OS processes that outlive the Runtime that began them.

Begin with `shim.py`, the program that stands between a command and us, and its docstring.
"""
