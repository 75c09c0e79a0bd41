"""Tests of what moves between stages."""
