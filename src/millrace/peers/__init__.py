"""The cluster cache: many nodes' disks as one. See docs/design/0010-cluster.md."""
