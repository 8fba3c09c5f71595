.PHONY: gpu-check gpu-check-ranks

gpu-check: venv ## on a machine with CUDA: kernel, graphs, waits (under 10 minutes)
	$(PYTEST) -m cuda tests/gpu

gpu-check-ranks: venv ## on a machine with two CUDA devices: tensor parallel over NCCL
	$(PYTEST) -m cuda_ranks tests/gpu
