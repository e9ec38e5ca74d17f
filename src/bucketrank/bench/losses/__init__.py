"""``bucketrank bench losses``: time, memory and operations of each ranking loss on the paper's synthetic logits.

``loss_timing`` plans every cell (``cell_plan``), times its contenders (``loss_contenders``) and returns the
``loss_results``, which ``loss_report`` and ``loss_figure`` write. Needs ``pip install "bucketrank[bench]"``.
"""
