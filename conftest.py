"""Collection of the examples in docstrings: modules of kernels are left out where their compiler is not installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/bucketrank/losses/triton_backend/*"]
