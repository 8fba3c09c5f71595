.PHONY: prometheus

prometheus: venv ## Debian's Prometheus, unpacked into the cache: PromQL guards are tested against it
	@PYTHONPATH=tests $(PY) -c 'from e2e.harness.prometheus import program; print(program())'
