"""The bytes on this node's disks: data files, segments, the index, checksums and seals.

It does not depend on origins, eviction or clusters. Any number of processes may use one store at the same time.

Key terms:
- block: the fixed-size unit of caching and transfer; it is cached when its checksum is in the index.
- segment: an immutable file that holds many small objects.
- seal: the verified checksums of a complete data file or segment, which allow it to be mapped.
- index: the LMDB environment that records every cached object and block.

Start reading in `store.py`, then `index.py`. Space and reservations are in `space.py`, verification in `seals.py`.
"""
