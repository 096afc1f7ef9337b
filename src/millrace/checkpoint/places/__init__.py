"""Where a checkpoint's files lie: directories and stores, complete manifests, and intact chunks out of them."""
