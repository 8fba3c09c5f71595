CLUSTER := tests/e2e/cluster/cluster

.PHONY: cluster images cluster-binaries cluster-status clean-cluster lock

cluster: ## the test cluster, built if need be and started (cold: about 12 minutes; warm: seconds)
	@$(CLUSTER) up

images: ## build what has changed of images/ and load it into the cluster
	@$(CLUSTER) images

cluster-binaries: ## only build the cluster's programs
	@$(CLUSTER) build

cluster-status: ## the test cluster's nodes and pods
	@$(CLUSTER) status

clean-cluster: ## stop the test cluster and take back all that it changed on the machine
	@$(CLUSTER) clean

lock: ## pin requirements.txt and those of the images, from pyproject.toml
	@for extra in dev operator runtime; do \
	  if [ $$extra = dev ]; then out=requirements.txt; pins=; else out=images/$$extra/requirements.txt; pins="-c requirements.txt"; fi; \
	  $(UV) pip compile -q pyproject.toml --extra $$extra --python-version 3.11 --no-annotate \
	    --custom-compile-command "make lock" $$pins -o $$out; done
