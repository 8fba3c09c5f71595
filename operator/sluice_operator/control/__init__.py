"""The running operator: cache, queue, reconcilers and the loops around the pure plan. All I/O order is
decided here."""
