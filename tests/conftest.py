"""Settings and fixtures for all tests."""

from hypothesis import settings

from tests.threads import one_thread, two_threads

__all__ = ["one_thread", "two_threads"]

# No deadline: the first call of a kernel compiles it. The same examples every time: what failed once fails again.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")
