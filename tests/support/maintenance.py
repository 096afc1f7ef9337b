"""Maintenance that runs only when a test calls `run_tasks` or the task itself."""

from __future__ import annotations

from millrace.runtime.maintenance import PeriodicThread, Task


class ManualMaintenance(PeriodicThread):
    """Periodic tasks without a thread: only `run_all` calls them."""

    def register(self, task: Task) -> None:
        self.due[task] = 0.0

    def forget(self) -> None:
        """Unregister all tasks."""
        self.due.clear()


MANUAL_MAINTENANCE = ManualMaintenance("manual-maintenance")
