"""A state dict on this side: flat, its tensors as bytes, and copied so that the training may go on."""
