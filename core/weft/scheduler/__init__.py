"""Continuous batching: waiting queue, token budget, preemption."""

from weft.scheduler.scheduler import Scheduler

__all__ = ("Scheduler",)
