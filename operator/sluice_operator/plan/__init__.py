"""What ought to be, as pure functions of what was seen: no clock, no I/O, no client. See
``docs/architecture.md``."""
