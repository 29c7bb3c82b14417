"""Continuous batching: waiting queue, token budget, preemption."""

from treadle.scheduler.scheduler import Scheduler

__all__ = ("Scheduler",)
