"""What every part needs of the process it runs in: threads in order, their priority, copies by address, the collector."""
