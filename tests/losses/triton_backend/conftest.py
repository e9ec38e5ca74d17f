"""These tests run the Triton kernels on CPU tensors, in Triton's interpreter, in a process of their own.

The interpreter has to be chosen before Triton is imported: ``TRITON_INTERPRET=1 pytest tests/losses/triton_backend``.
``tests/losses/test_triton.py`` does so; without the variable nothing is collected here.
"""

import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    import pytest
    from triton.runtime.interpreter import InterpretedFunction

    from bucketrank.losses.triton_backend import triton_ranking

    @pytest.fixture(autouse=True)
    def fast_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
        """Halve the time of the interpreter.

        Every program adds up all copies of the buckets; three copies show what more would. A kernel that calls one of
        our own functions has prepared Triton's language already; the interpreter would do so in every call.
        """
        monkeypatch.setattr(triton_ranking, "COPIES", 3)
        prepare_and_call = InterpretedFunction.__call__

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if function.fn.__module__.startswith("bucketrank."):
                return function.rewrite()(*args, **kwargs)
            return prepare_and_call(function, *args, **kwargs)

        monkeypatch.setattr(InterpretedFunction, "__call__", call)
