"""Workloads and how they are measured."""
