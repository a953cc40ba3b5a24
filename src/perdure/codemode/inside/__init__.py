"""What runs inside of CPython's sandbox, beside the code of a model: it needs nothing but the standard library.

`values` serves both sides. `driver` is the program that the sandbox runs, and is imported by no other module.
"""
