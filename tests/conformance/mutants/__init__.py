"""Plugins that are wrong in one way each, by kind: what shows that the suites of the kit bite.

A module for each kind names its ``SPECIMENS``; ``tests/conformance/test_mutants.py`` runs them all.
"""
