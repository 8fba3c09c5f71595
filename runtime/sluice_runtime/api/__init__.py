"""The OpenAI-compatible HTTP surface. Invariant: nothing here imports torch, transformers or the operator."""
