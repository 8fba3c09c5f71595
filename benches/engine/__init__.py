"""`make bench-engine`: this engine beside its peers, and beside the limits of the machine."""
