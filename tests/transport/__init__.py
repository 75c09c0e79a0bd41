"""Tests of how bytes move."""
