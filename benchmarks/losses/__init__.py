"""``python -m benchmarks losses``: time, memory and operations of each ranking loss on the paper's synthetic logits.

``measure`` times the ``contenders`` of every cell, skips those that are too slow by ``estimate``, and returns the
``results``, which ``report`` writes. It needs ``pip install "bucketrank[bench]"``.
"""
