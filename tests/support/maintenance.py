"""Maintenance that runs only when a test calls `run_tasks` or the task itself."""

from __future__ import annotations

from millrace.runtime.maintenance import PeriodicThread, Task


class AskedMaintenance(PeriodicThread):
    """Has the tasks, and no thread that calls them: `run_all` does."""

    def register(self, task: Task) -> None:
        self._due[task] = 0.0

    def forget(self) -> None:
        """Unregister all tasks."""
        self._due.clear()


ASKED_MAINTENANCE = AskedMaintenance("asked-maintenance")
