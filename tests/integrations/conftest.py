"""Settings for the tests of the adapters: small models are quickest on one thread."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread_everywhere(one_thread):
    return
