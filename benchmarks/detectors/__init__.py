"""``python -m benchmarks detectors``: seconds per training iteration of each detector with each loss.

``measure`` times whole steps of the ``contenders`` and the loss in them, and returns the ``results``, which ``report``
writes. It needs ``pip install "bucketrank[detect]"``.
"""
