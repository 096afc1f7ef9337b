"""State dicts and tensors: flattening, copies into reused host memory, conversion to the format, safe objects.

Key terms:
- staging: copying a state to host memory, so that training continues during the save.
- arena: the reused host memory of staged states.
- wrapper tensor: a tensor subclass that stores its values in inner tensors. Its *recipe* describes how to build it.

Start reading in `tensors.py` (torch tensors and the format), then `flattening.py`, `staging.py` and `wrappers.py`.
"""
