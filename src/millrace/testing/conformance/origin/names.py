"""Names that users have, and names with which somebody means harm."""

from __future__ import annotations

import pytest

from millrace.errors import MillraceError
from millrace.origin import Origin
from millrace.testing.conformance.origin.base import Contents, OriginSuite, listed

ODD_NAMES = (
    "plain.bin",
    "with space",
    "per%cent %41",
    "hash#tag?query",
    "plus+and&",
    "ünï-ćødé-漢字-🦀",
    "quote'and\"double",
    "brackets[0]{1}(2)*",
    "back\\slash",
    "..double..dots..",
    "colon:equals=comma,semi;",
    "x" * 200,
)
"""Last parts of keys that users have, and that clients like to mistreat."""

HOSTILE_NAMES = (
    ".",
    "..",
    "../decoy",
    "in/../decoy",
    "in/../../decoy",
    "./decoy",
    "in/./decoy",
    "in//decoy",
    "in\\..\\decoy",
    "%2e%2e/decoy",
    "..%2Fdecoy",
    "in%2Fdecoy",
    "in%252Fdecoy",
    "%64ecoy",
    "decoy%00",
    "decoy\x00",
    "decoy\x00.txt",
    "decoy\n",
    "de\r\ncoy",
    "\tdecoy",
    "decoy\x7f",
    "decoy ",
    "decoy.",
    "DECOY",
    "decoy#",
    "decoy?",
    "decoy?versionId=1",
    "decoy\u202e",
    "decoy\u2028",
    "decoy\ufeff",
    "decoy\udc80",
    "~",
    "*",
    "e\u0301",  # the same to the eye as the next one, and another name
    "\u00e9",
    "y" * 255,
    "y" * 256,
    "y" * 1024,
    "y" * 5000,
    "漢" * 200,  # 600 bytes
    "/".join(["deep"] * 190),
    "/".join(["z" * 100] * 9),
    "/".join(["z" * 100] * 12),
)
"""What comes after a prefix, below which lie `decoy` and `in/decoy`: each is an error, or an object of its own."""


class Names(OriginSuite):
    """A key names one object, and no other."""

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_odd_names_are_kept(self, origin: Origin, contents: Contents, root: str, name: str) -> None:
        if name in self.unsupported_names:
            pytest.skip("the storage behind this origin has no such names")
        key = f"{root}/odd {name}/{name}"
        contents.put(key, name.encode())
        info = origin.head(key)
        assert info.key == key
        assert bytes(origin.read(key, 0, info.size, version=info.version)) == name.encode()
        if self.lists:
            assert [found.key for found in listed(origin, root)] == [key]
            assert origin.list_level(root).prefixes == [f"{root}/odd {name}"]
        if self.writes:
            origin.delete([key])
            if self.lists:
                assert listed(origin, root) == []

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    def test_a_hostile_name_is_an_error_or_an_object_of_its_own(
        self, origin: Origin, contents: Contents, root: str, name: str
    ) -> None:
        if name in self.unsupported_names:
            pytest.skip("the storage behind this origin reads such a name by its own rules")
        decoys = [f"{root}/{place}decoy" for place in ("", "names/", "names/in/")]
        for decoy in decoys:
            contents.put(decoy, decoy.encode())
        key, mine = f"{root}/names/{name}", b"mine"
        made = self._made(origin, key, mine)
        if made:
            info = origin.head(key)
            assert (info.key, info.size) == (key, len(mine))
            assert bytes(origin.read(key, 0, len(mine), version=info.version)) == mine
        else:
            for call in (lambda: origin.head(key), lambda: origin.read(key, 0, 1)):
                with pytest.raises(MillraceError):
                    call()
        assert [bytes(origin.read(decoy, 0, len(decoy))) for decoy in decoys] == [decoy.encode() for decoy in decoys]
        if self.lists:
            assert sorted(info.key for info in listed(origin, root)) == sorted(decoys + [key] * made)
        if self.writes:
            self._delete(origin, key)
            assert [origin.head(decoy).size for decoy in decoys] == [len(decoy) for decoy in decoys]

    def _made(self, origin: Origin, key: str, data: bytes) -> bool:
        """Whether it could be put; an origin that cannot write has no object of a name that nobody made."""
        if not self.writes:
            return False
        try:
            origin.put(key, data)
        except MillraceError:
            return False
        return True

    def _delete(self, origin: Origin, key: str) -> None:
        try:
            origin.delete([key])
        except MillraceError:
            return  # it is no name here, which is as good: nothing was deleted by it
