"""Benchmarks of the losses (``bucketrank bench losses``) and of the detectors (``bucketrank bench detectors``).

The two packages inside hold one benchmark each; the modules beside them are shared by both.
"""
