.PHONY: envoy bench-gateway

envoy: venv ## the gateway's program, into the cache
	@PYTHONPATH=operator $(PY) -c 'from sluice_operator.xds.local import envoy_program; print(envoy_program())'

bench-gateway: envoy ## what the gateway adds to a request
	@$(PY) benches/gateway.py
