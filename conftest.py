"""Settings that come before all imports: instructions of the CPU, and the collection of examples in docstrings.

Some virtual machines announce the matrix instructions of a CPU (AMX) and do not execute them; torch's bfloat16 layers
then end the process with "Illegal instruction". The tests use all other instructions. Modules of kernels are left out
where their compiler is not installed.
"""

import os
from importlib.util import find_spec

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # read by torch's oneDNN at its first layer

collect_ignore_glob = [] if find_spec("triton") else ["src/bucketrank/losses/triton/*"]
