"""Process-level services that every other package uses.

Private files and directories, locks between processes, periodic tasks, state that a forked child must reset, single flight
for fetches, imports at the first use, jobs on several threads, and the management of memory.

Key terms:
- periodic task: a function that one thread of the process calls at intervals.
- single flight: of several concurrent requests for one block, one fetches and the others wait for its result.
- named lock: a lock that all processes of a node share; the kernel releases it when its owner ends.

Start reading in `locks.py`, then `maintenance.py`.
"""
