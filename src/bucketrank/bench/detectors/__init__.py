"""``bucketrank bench detectors``: seconds per training iteration of each detector with each loss.

``detector_timing`` builds the contenders (``detector_contenders``) on a synthetic batch (``scene``), times whole steps
and the loss in them (``loss_share``), and returns the ``detector_results``, which ``detector_report`` and
``detector_figure`` write. Needs ``pip install "bucketrank[detect]"``.
"""
