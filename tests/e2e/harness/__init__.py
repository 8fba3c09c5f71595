"""What the demo, the end-to-end tests and the benchmarks share: the cluster, the installation, the load and
the evidence.

It knows a cluster only by KUBECONFIG, and Sluice only by what its users see: resources, the gateway's port, a
pod's admin stream.
"""
