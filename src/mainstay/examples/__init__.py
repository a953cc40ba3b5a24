"""Example programs that are shipped with the package, so that commands can run them."""
