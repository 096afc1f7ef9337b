"""Which cached objects stay when space is needed: usage records, the policy, and retention rules.

Key terms:
- candidate: an object to be admitted to a full store; either a resident object is evicted for it, or it is not kept.
- group: the data set of an object; its objects become idle together.
- retention rule: a pin, quota or TTL for a URL prefix.

Start reading in `policy.py` (the interface), `keep_policy.py` (the policy), then `evictor.py`. Another policy is one module:
docs/contributing/new-eviction-policy.md.
"""
