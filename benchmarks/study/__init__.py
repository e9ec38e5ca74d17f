"""``python -m benchmarks study``: the paper's tables with our numbers, and losses compared in one detector.

``grid`` lists what is trained, ``plan`` the ``runs``, and ``command`` trains those that are not finished. ``steps``
times single steps. ``tables`` and ``losses`` write the results. ``synthetic`` trains nothing: it times the losses on
synthetic logits.
"""
