"""What exists: frozen structs and closed unions, and nothing that acts.

The structs opt out of garbage collection (`gc=False`). They hold data that points down, never back, so they cannot be
part of a cycle; and a long session is made of enough of them for the collector to be felt.
"""

VERSION = "0.1.0"
"""The version of this package, as workers tell it to others."""
