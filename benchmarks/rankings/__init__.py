"""Many rankings at once: time and memory (``scale``), retrieval (``omniglot``) and rare classes (``rare``)."""
