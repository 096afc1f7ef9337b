"""The families of speech models that a run can train: what differs between them stands behind one Protocol."""
