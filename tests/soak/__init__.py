"""Long random tests, outside the test suite: annotation files, the losses in threads, and strikes into runs."""
