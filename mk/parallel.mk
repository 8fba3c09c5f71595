.PHONY: bench-parallel

bench-parallel: venv ## scaling efficiency of tensor parallelism, two ranks on this machine's CPUs (under 4 minutes)
	$(PY) benches/parallel.py
