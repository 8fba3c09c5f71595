"""The kernels in C, and how they are built. Imports nothing, so that an image's build can run `build.py`."""
