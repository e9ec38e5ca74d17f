"""Settings of the process that some packages change when they are imported or used, restored afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image


@contextmanager
def restored_process_settings() -> Iterator[None]:
    """Restore the environment, print options, functions and modes of torch and of Pillow, for the tests that follow."""
    environment, numpy_options = dict(os.environ), np.get_printoptions()
    torch_options, save = dict(vars(torch._tensor_str.PRINT_OPTS)), torch.save
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    deterministic, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    opened, most_pixels = Image.open, Image.MAX_IMAGE_PIXELS
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        np.set_printoptions(**numpy_options)
        torch.set_printoptions(**torch_options)
        torch.save = save
        Image.open, Image.MAX_IMAGE_PIXELS = opened, most_pixels
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic = cudnn
