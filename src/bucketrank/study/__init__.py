"""``bucketrank study``: reproduce the paper's tables.

``grid`` lists the rows of each table, ``study_plan`` the runs that they need, ``run_queue`` trains those that are not
finished, ``step_measurements`` times steps, and ``study_results`` collects the numbers for ``study_tables``,
``study_figures`` and ``claims``. ``loss_comparison`` compares losses in one head, with ``loss_outcome`` and
``loss_document``. ``synthetic_study`` needs no training: it times the losses on synthetic logits.
"""
