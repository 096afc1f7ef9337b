"""Unusual names of users, and hostile names."""

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
"""Last parts of real keys that clients often handle wrongly."""

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
    "e\u0301",  # looks like the next one, but is another name
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
"""Names below a prefix that contains `decoy` and `in/decoy`: each is an error, or a separate object."""


class Names(OriginSuite):
    """A key names exactly one object."""

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_odd_name_names_its_object(self, origin: Origin, contents: Contents, root: str, name: str) -> None:
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
                assert [found.key for found in listed(origin, root) if found.key != f"{root}/odd {name}/"] == []

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    def test_hostile_name_is_an_error_or_a_separate_object(
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
        """Whether the put succeeded; False for an origin that cannot write."""
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
            return  # the name is not valid here, so nothing was deleted
