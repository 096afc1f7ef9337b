"""What a training loop holds: the manager, its saves beside the training, restores, and where in the data it stands."""
