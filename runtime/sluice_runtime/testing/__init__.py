"""Stand-ins that benches and end-to-end tests run in the place of a model; shipped, so that images can hold

them.
"""
