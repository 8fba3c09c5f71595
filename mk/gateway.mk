## envoy: install the gateway's program into the cache
.PHONY: envoy
envoy:
	@PYTHONPATH=operator .venv/bin/python -c 'from sluice_operator.xds.local import envoy_program; print(envoy_program())'

## bench-gateway: milliseconds that the gateway adds to a request
.PHONY: bench-gateway
bench-gateway:
	@.venv/bin/python benches/gateway.py
