"""Parts of the web origin that send no request: addresses, headers, options, index pages."""

import pickle
import time
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from urllib3 import HTTPHeaderDict

from millrace.errors import (
    ConfigurationError,
    DeniedError,
    MillraceError,
    ObjectChangedError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    UsageError,
)
from millrace.origin.web.addresses import readable, redirected, same_server, shown, url_of
from millrace.origin.web.listings import parse_index
from millrace.origin.web.options import web_options
from millrace.origin.web.responses import (
    ContentRange,
    check_encoding,
    content_length,
    content_range,
    precondition,
    refusal,
    retry_after,
    version_of,
)


def _headers(**values: str) -> HTTPHeaderDict:
    return HTTPHeaderDict({name.replace("_", "-"): value for name, value in values.items()})


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("host/a/b.bin", "https://host/a/b.bin"),
        ("host", "https://host/"),
        ("host:8443/x", "https://host:8443/x"),
        ("[::1]:80/x", "https://[::1]:80/x"),
        ("host/a b/ü", "https://host/a%20b/%C3%BC"),
        ("host/a%20b", "https://host/a%20b"),
        ("host/100%", "https://host/100%25"),
        ("host/100%zz", "https://host/100%25zz"),
        ("host/x?a=1&b=c/d?e", "https://host/x?a=1&b=c/d?e"),
        ("host?id=3", "https://host/?id=3"),
        ("host/q?name=ü b", "https://host/q?name=%C3%BC%20b"),
        ("bücher.example/x", "https://xn--bcher-kva.example/x"),
        ("host/back\\slash", "https://host/back%5Cslash"),
        ("host/..double..", "https://host/..double.."),
    ],
)
def test_web_key_is_encoded_once(key: str, url: str) -> None:
    assert url_of("https", key) == url


@pytest.mark.parametrize(
    "key",
    ["", "/x", "ho st/x", "host:port/x", "host/../x", "host/a/%2e%2e/x", "host/./x", "host/a/.%2E", "host/a\nb",
     "host/\x00", "host/\udc80", "host/x#part", "host/a?b#c", "user@host/x", "user:planted@host/x", "-host/x", "a..\nb/x"],
)  # fmt: skip
def test_unusual_url_is_refused(key: str) -> None:
    with pytest.raises((UsageError, ObjectNotFoundError)) as caught:
        url_of("https", key)
    assert "planted" not in str(caught.value)


@pytest.mark.parametrize(
    ("encoded", "name"),
    [
        ("a%20b", "a b"),
        ("%C3%BC", "ü"),
        ("100%25", "100%25"),
        ("a%23b%3Fc%2Fd", "a%23b%3Fc%2Fd"),
        ("tab%09", "tab%09"),
        ("%FF%20", "%FF%20"),
        ("plus%2Band%26", "plus+and&"),
        ("back%5Cslash", "back\\slash"),
    ],
)
def test_listed_name_names_the_same_file(encoded: str, name: str) -> None:
    assert readable(encoded) == name
    if "%09" not in encoded:
        assert unquote(url_of("http", f"h/{name}"), errors="surrogateescape") == unquote(
            f"http://h/{encoded}", errors="surrogateescape"
        )


def test_messages_show_no_query_and_no_password() -> None:
    assert shown("https://u:p@host/a?X-Amz-Signature=abc") == "https://host/a?..."


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/b", "https://host/b"),
        ("c?x=1", "https://host/dir/c?x=1"),
        ("https://other/d#part", "https://other/d"),
        ("//other/e", "https://other/e"),
        ("/with space", "https://host/with%20space"),
    ],
)
def test_redirect_location_is_resolved_to_a_web_address(location: str, target: str) -> None:
    assert redirected("https://host/dir/a", location) == target


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://h/x", "http://host/a", "https://u:p@h/x", "https://h:99999/"]
)
def test_redirects_elsewhere_are_refused(location: str) -> None:
    with pytest.raises(MillraceError):
        redirected("https://host/dir/a", location)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("https://host/a", "https://HOST:443/b", True),
        ("https://host/a", "http://host/a", False),
        ("https://host/a", "https://host:8443/a", False),
        ("https://host/a", "https://host.evil/a", False),
    ],
)
def test_server_is_scheme_host_and_port(one: str, other: str, same: bool) -> None:
    assert same_server(one, other) is same


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("bytes 0-9/100", ContentRange(0, 10, 100)),
        ("bytes 5-5/*", ContentRange(5, 6, None)),
        ("bytes */100", ContentRange(0, 0, 100)),
        ("bytes 9-0/100", None),
        ("bytes 0-100/100", None),
        ("items 0-9/100", None),
        ("bytes 0-9/" + "9" * 5000, None),
        ("bytes 0-" + "9" * 5000 + "/*", None),
        ("", None),
    ],
)
def test_content_range_header_is_parsed(text: str, parsed: ContentRange | None) -> None:
    assert content_range(_headers(Content_Range=text)) == parsed


@pytest.mark.parametrize(
    ("headers", "parsed"),
    [
        ({"Content-Length": "0"}, 0),
        ({"Content-Length": "123456789012345678"}, 123456789012345678),
        ({}, None),
        ({"Content-Length": "5", "Transfer-Encoding": "chunked"}, None),
    ],
)
def test_content_length_header_is_parsed(headers: dict[str, str], parsed: int | None) -> None:
    assert content_length(_response(headers)) == parsed


def _response(headers: dict[str, str]) -> Any:
    return SimpleNamespace(headers=HTTPHeaderDict(headers), url="http://h/x")


@pytest.mark.parametrize("text", ["9" * 5000, "-1", "x", "", str(1 << 63)])
def test_invalid_content_length_raises(text: str) -> None:
    with pytest.raises(OriginUnavailableError, match="http://h/x: the response has the invalid length"):
        content_length(_response({"Content-Length": text}))


def test_strong_tag_is_the_version() -> None:
    one = version_of(_headers(ETag='"a"', Last_Modified="Sat, 01 Jan 2022 00:00:00 GMT"), 5)
    assert one == version_of(_headers(ETag='"a"'), 5) == '"a"'
    assert precondition(one) == {"If-Match": '"a"'}


def test_weak_tag_with_date_and_size_is_the_version() -> None:
    date, later = "Sat, 01 Jan 2022 00:00:00 GMT", "Sat, 01 Jan 2022 00:00:01 GMT"
    versions = [
        version_of(_headers(ETag='W/"a"', Last_Modified=date), 5),
        version_of(_headers(ETag='W/"b"', Last_Modified=date), 5),
        version_of(_headers(ETag='W/"a"', Last_Modified=later), 5),
        version_of(_headers(ETag='W/"a"', Last_Modified=date), 6),
        version_of(_headers(Last_Modified=date), 5),
        version_of(_headers(), 5),
    ]
    assert len(set(versions)) == len(versions)
    assert precondition(versions[0]) == {"If-Unmodified-Since": date}
    assert precondition(versions[-1]) == {}


@pytest.mark.parametrize("tag", ["x" * 10_000, '"ü"', "~made-up"])
def test_unsendable_tag_distinguishes_versions(tag: str) -> None:
    version = version_of(_headers(ETag=tag), 5)
    assert len(version) < 300
    assert version != version_of(_headers(ETag=tag + "y"), 5)
    assert "If-Match" not in precondition(version)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "17"}, 17.0),
        ({"Retry-After": "-3"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "9" * 5000}, 1e9),
        ({}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55.0),
        ({"RateLimit": '"api";r=3;t=55'}, None),
        ({"Retry-After": formatdate(1_700_000_030, usegmt=True)}, 30.0),
        ({"Retry-After": formatdate(1_600_000_000, usegmt=True)}, 0.0),
    ],
)
def test_retry_after_of_server_is_parsed(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(HTTPHeaderDict(headers), 1_700_000_000.0) == seconds


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, ObjectNotFoundError), (410, ObjectNotFoundError), (401, DeniedError), (403, DeniedError),
     (412, ObjectChangedError), (429, OriginBusyError), (503, OriginBusyError), (500, OriginUnavailableError),
     (504, OriginUnavailableError), (408, OriginUnavailableError), (400, UsageError), (418, UsageError)],
)  # fmt: skip
def test_each_status_raises_its_error(status: int, kind: type[MillraceError]) -> None:
    error = refusal(status, _headers(Retry_After="9"), "https://host/x?sig=planted", time.time())
    assert type(error) is kind
    assert error.next_step
    assert "planted" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    if isinstance(error, OriginBusyError):
        assert error.retry_after == 9.0


@pytest.mark.parametrize(
    ("coding", "path", "refused"),
    [("gzip", "/a.csv", True), ("gzip", "/a.csv.gz", False), ("x-gzip", "/a.tgz", False), ("br", "/a.gz", True),
     ("identity", "/a", False), ("GZIP", "/a", True)],
)  # fmt: skip
def test_content_encoding_is_allowed_only_for_compressed_files(coding: str, path: str, refused: bool) -> None:
    headers = _headers(Content_Encoding=coding)
    if refused:
        with pytest.raises(UsageError):
            check_encoding(headers, f"https://host{path}")
    else:
        check_encoding(headers, f"https://host{path}")


@pytest.mark.parametrize(
    "options",
    [
        {"headers": {"Authorization": "Basic dTpwbGFudGVk"}},
        {"auth": ("u", "planted")},
        {"client_kwargs": {"auth": ["u", "planted"]}},
        {"client_kwargs": {"headers": {"Authorization": "Basic dTpwbGFudGVk"}}},
    ],
)
def test_login_is_accepted_in_each_form_of_fsspec(options: dict[str, object]) -> None:
    made = web_options(options)
    assert made.headers == {"Authorization": "Basic dTpwbGFudGVk"}
    assert made.signs_in
    assert "planted" not in repr(made)
    assert not made.open_headers


@pytest.mark.parametrize(
    "options",
    [
        {"user": "planted"},
        {"client_kwargs": {"connector": "planted"}},
        {"headers": ["planted"]},
        {"headers": {"X": "planted\r\nY: 1"}},
        {"headers": {"Range": "bytes=0-planted"}},
        {"headers": {"If-Match": "planted"}},
        {"headers": {"Accept-Encoding": "gzip"}},
        {"auth": "planted"},
        {"auth": ("u", None)},
        {"auth": ("u", "planted"), "headers": {"authorization": "planted"}},
        {"cookies": {"a": "planted;b"}},
        {"verify": 3},
        {"verify": True, "ssl": False},
        {"timeout": -1},
        {"client_kwargs": {"trust_env": "planted"}},
        {"timeout": "planted"},
    ],
)
def test_invalid_option_raises_without_its_value(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        web_options(options)
    assert "planted" not in str(caught.value)


def test_unknown_option_raises_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"client_kwargs.*headers.*verify"):
        web_options({"header": {}})


def test_options_of_fsspecs_own_reading_have_no_effect() -> None:
    assert web_options({"block_size": 5, "cache_type": "none", "timeout": 3}) == web_options({"timeout": 3.0})


def test_index_page_links_are_the_entries_directly_below() -> None:
    page = parse_index(
        "https://host/data/",
        """<html><a href="?C=N;O=D">Name</a> <a href="../">up</a> <a href="/">root</a> <a href="a%20b.bin">a b</a>
        <a HREF='c.bin'>c</a><a href="c.bin">again</a> <a href="sub/">sub</a> <a href="sub/deep.bin">deep</a>
        <a href="https://host/data/full.bin">full</a> <a href="https://other/data/x.bin">other</a> <a href="//[">broken</a>
        <a href="q.bin?x=1">query</a> <a name="anchor">none</a> <a href="#top">top</a> <a href="z.bin#frag">z</a>""",
    )
    assert list(page.files) == ["a b.bin", "c.bin", "full.bin", "z.bin"]
    assert list(page.directories) == ["sub"]


def test_index_page_links_to_parent_in_encoded_form_are_left_out() -> None:
    page = parse_index("https://host/data/", '<a href="%2e%2e/">up</a> <a href=".%2E">up</a> <a href="%2e/">this</a>')
    assert (list(page.files), list(page.directories)) == ([], [])
