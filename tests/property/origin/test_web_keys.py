"""Any key of the web or the hub is refused, or names one resource of its own server."""

from urllib.parse import quote, unquote, urlsplit

from hypothesis import example, given
from hypothesis import strategies as st

from millrace.errors import MillraceError
from millrace.origin.hub.names import file_url, parse_name
from millrace.origin.web.addresses import readable, redirected, same_server, shown, url_of

TEXT = st.text(max_size=40)
ODD = st.text(alphabet="ab/.%@?#:\\ \t2eEfF[]ü\x00\udc80+&", max_size=30)


@given(host=st.sampled_from(["host", "host:8080", "[::1]", "sub.host.org"]), rest=TEXT | ODD)
@example(host="host", rest="/%2e%2E/x")
@example(host="host", rest="@evil/x")
def test_key_never_leaves_its_server_or_directory(host: str, rest: str) -> None:
    key = host + rest
    try:
        url = url_of("https", key)
    except MillraceError:
        return
    parts = urlsplit(url)
    assert url.isascii()
    assert parts.username is None
    assert parts.fragment == ""
    assert not {"..", "."} & set(unquote(parts.path).split("/")) or "%2F" in parts.path.upper()
    named = key.split("/")[0].split("?")[0]
    if named.isascii():  # others have a name of their own in the domain name system
        assert parts.hostname == urlsplit(f"https://{named}").hostname
    assert url_of("https", url.removeprefix("https://")) == url  # encoded once
    assert "?" not in shown(url).removesuffix("?...")


@given(name=st.text(min_size=1, max_size=30).filter(lambda name: "/" not in name))
def test_any_listed_name_leads_to_its_file(name: str) -> None:
    try:
        encoded = quote(name, safe="")
    except UnicodeEncodeError:
        return
    try:
        url = url_of("http", f"host/{readable(encoded)}")
    except MillraceError:
        assert name in (".", "..")
        return
    assert unquote(urlsplit(url).path) == "/" + name


@given(location=TEXT | ODD)
def test_redirect_stays_on_the_web_and_keeps_encryption(location: str) -> None:
    try:
        target = redirected("https://host/dir/x", location)
    except MillraceError:
        return
    parts = urlsplit(target)
    assert parts.scheme == "https"
    assert parts.hostname
    assert parts.username is None
    assert same_server(target, "https://host/") is (parts.netloc.lower() in ("host", "host:443", "host:"))


@given(key=TEXT | ODD | st.builds("{}/{}/{}".format, st.sampled_from(["datasets/u", "u", "spaces/u"]), TEXT, ODD))
@example(key="u/r@refs%2Fpr%2F1/x")
@example(key="u/r/..%2f..%2fsecret")
def test_hub_name_stays_in_its_repository(key: str) -> None:
    try:
        name = parse_name(key)
    except MillraceError:
        return
    url = file_url("https://hub", name.repository, name.revision, name.path)
    assert url.isascii()
    parts = urlsplit(url)
    assert parts.netloc == "hub"
    assert not parts.query
    assert not parts.fragment
    segments = parts.path.split("/")
    assert not {"", ".", ".."} & set(segments[1:-1])
    place = name.repository.web_path.count("/") + 2
    assert segments[place] == "resolve"
    assert unquote(segments[place + 1]) == name.revision
    assert unquote("/".join(segments[place + 2 :])) == name.path
    if name.path:
        assert parse_name(name.key(name.path)) == name
