"""Measuring the losses: ``bucketrank bench losses``, which needs ``pip install "bucketrank[bench]"``."""
