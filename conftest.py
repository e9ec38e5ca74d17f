"""Settings that come before all imports: CPU instructions, Ctrl-C, and which docstring examples are collected.

Some virtual machines announce the matrix instructions of a CPU (AMX) and do not execute them; torch's bfloat16 layers
then end the process with "Illegal instruction". The tests use all other instructions. Shells start background jobs with
SIGINT ignored, but tests send it. Modules of kernels are left out where their compiler is not installed.
"""

import os
import signal
from importlib.util import find_spec

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # read by torch's oneDNN at its first layer
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore_glob = [] if find_spec("triton") else ["src/bucketrank/losses/triton/*"]
