"""The engine: continuous batching, paged KV and sampling behind one small interface.

Import `Engine` from `sluice_runtime.engine.engine` (needs torch) and everything that is plain data from
`sluice_runtime.engine.types` (needs nothing). Invariant: `types`, `blocks`, `scheduler` and `detokenizer`
never import torch, so that their tests and the server's start in milliseconds.
"""
