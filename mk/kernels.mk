KERNELS := runtime/sluice_runtime/engine/kernels

.PHONY: kernels

kernels: $(KERNELS)/libsluice.so ## the engine's C kernels, where their sources changed

$(KERNELS)/libsluice.so: $(wildcard $(KERNELS)/*.c $(KERNELS)/*.h) $(KERNELS)/build.py .venv/.done
	@echo "· compiling the engine's kernels"
	@ZIG_GLOBAL_CACHE_DIR=$(SLUICE_CACHE)/zig ZIG_LOCAL_CACHE_DIR=$(SLUICE_CACHE)/zig $(PY) $(KERNELS)/build.py
	@touch $@
