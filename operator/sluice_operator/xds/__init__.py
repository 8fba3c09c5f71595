"""The gateway: plain state in, xDS resources out, and what Envoy tells back."""
