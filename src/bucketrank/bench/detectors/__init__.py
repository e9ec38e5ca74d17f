"""Measuring the detectors: ``bucketrank bench detectors``, which needs ``pip install "bucketrank[detect]"``."""
