"""These tests run the Triton kernels on CPU tensors, in Triton's interpreter, in a process of their own.

The interpreter has to be chosen before Triton is imported: ``TRITON_INTERPRET=1 pytest tests/losses/triton_backend``.
``tests/losses/test_triton.py`` does so; without the variable nothing is collected here.
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
