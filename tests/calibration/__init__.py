"""Tests of calibrated scores."""
