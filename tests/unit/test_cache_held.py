from millrace.cache.held import HeldBlocks

NAME = bytes(16)


def test_the_least_recently_used_goes_first() -> None:
    held = HeldBlocks(capacity_bytes=30)
    for block in range(3):
        held.put((NAME, block), bytes([block]) * 10)
    assert held.get(NAME, [0]) == {0: bytes(10)}
    held.put((NAME, 3), b"x" * 10)
    assert sorted(held.get(NAME, range(4))) == [0, 2, 3]
    held.put((NAME, 3), b"y" * 20)  # replaces, and counts its new size
    assert held.get(NAME, [3]) == {3: b"y" * 20}
    assert len(held.get(NAME, range(4))) == 2


def test_what_is_larger_than_all_is_not_held() -> None:
    held = HeldBlocks(capacity_bytes=5)
    held.put((NAME, 0), b"123456")
    assert held.get(NAME, [0]) == {}
