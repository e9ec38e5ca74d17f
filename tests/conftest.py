"""Settings for all tests."""

from hypothesis import settings

# No deadline: the first call of a kernel compiles it. The same examples every time: what failed once fails again.
settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")
