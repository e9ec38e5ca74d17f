"""Evidence for the claims of bucketrank: benchmarks of losses and detectors, and studies that train detectors.

Run ``python -m benchmarks`` in the root of a clone; this folder is not part of the installed package. ``losses`` and
``detectors`` hold one benchmark each, ``study`` the studies. The modules next to them are shared by all.
"""
