"""The status page in a headless Chromium, of a live cluster of two nodes.

With `SCREENSHOTS=docs/assets` in the environment the tests take the pictures of the documentation, in two minutes more.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image
from tests.support.chromium import Chromium, Tab
from tests.support.fork_server import ForkedProcess, torch_server
from tests.support.local_cluster import TOKEN, LocalCluster, LocalNode
from tests.support.terminal import Terminal, take_picture

import millrace
from millrace.origin import open_origin
from millrace.testing.process import ChildProcess
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytestmark = [pytest.mark.chromium, pytest.mark.slow]

FOLDER = os.environ.get("SCREENSHOTS")
OBJECTS, OBJECT_BYTES = 24, 400_000
TOTAL = OBJECTS * OBJECT_BYTES
NAMES = [f"speech/train/clips/{number}.parquet" for number in range(OBJECTS)]

_READ = """
import json, random, sys, time, millrace
fs = millrace.filesystem("s3", **json.loads(sys.argv[1]))
names = sys.argv[2:]
while True:
    for name in names:
        fs.cat_file(name)
        time.sleep(random.uniform(0, 0.2))
    random.shuffle(names)
"""

_SAVE = """
import sys, torch
from millrace.checkpoint import CheckpointManager
torch.manual_seed(0)
state = {"weight": torch.randn(300_000), "step": 0}
with CheckpointManager(sys.argv[1]) as run:
    for step in (100, 200, 300):
        state["weight"] += 1e-4
        run.save(step, state)
"""


@pytest.fixture(scope="module")
def region(s3: S3Server) -> Iterator[EmulatedRegion]:
    origin = open_origin("s3", s3.target_options)
    for bucket in ("speech", "images", "runs"):
        s3.create_bucket(bucket)
    for number, name in enumerate(NAMES):
        origin.put(name, os.urandom(OBJECT_BYTES))
        origin.put(f"images/val/{number}.parquet", os.urandom(OBJECT_BYTES))
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        yield region


@pytest.fixture(scope="module")
def cluster(region: EmulatedRegion, s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    options = {**s3.target_options, "endpoint_url": region.endpoint_url}
    directory = tmp_path_factory.mktemp("cluster")
    with LocalCluster(directory, 2, target_options=options, options=["--capacity", "80MB"], patient=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def readers(cluster: LocalCluster) -> Iterator[None]:
    """A process on each machine that reads a data set in a loop."""
    with contextlib.ExitStack() as running:
        for node in cluster.nodes:
            command = [sys.executable, "-c", _READ, json.dumps(cluster.arguments(node)), *NAMES]
            environment = {**os.environ, "MILLRACE_JOB": "train-speech"}
            running.enter_context(ChildProcess(command, log=node.directory / "reader.log", env=environment))
        yield


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(browser: Chromium, cluster: LocalCluster) -> Iterator[Tab]:
    """The page of the first node."""
    tab = browser.open(link_of(cluster.nodes[0]))
    tab.until("!document.querySelector('main').hidden")
    yield tab
    tab.close()


def link_of(node: LocalNode) -> str:
    return f"http://{node.address}/#token={TOKEN}"


def shot(page: Tab, name: str, *, dark: bool = False) -> None:
    """Write a picture for the documentation if wanted."""
    if FOLDER:
        path = Path(FOLDER) / f"{name}.png"
        page.screenshot(path, dark=dark)
        compress(path)


def compress(path: Path) -> None:
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


def until_text(page: Tab, selector: str, *texts: str) -> str:
    """Wait until an element contains all texts; returns its text."""
    element = f"document.querySelector({json.dumps(selector)}).innerText"
    found: str = page.until(f"{json.dumps(texts)}.every(text => {element}.includes(text)) && {element}")
    return found


def rows(page: Tab, selector: str) -> list[list[str]]:
    """The texts of the cells of a table."""
    cells = "[...row.children].map(cell => cell.innerText.trim())"
    found: list[list[str]] = page.evaluate(f"[...document.querySelectorAll('{selector} tbody tr')].map(row => {cells})")
    return found


def test_status_page_of_an_idle_cluster_shows_nodes_and_no_reads(page: Tab, cluster: LocalCluster) -> None:
    first, second = sorted(node.address for node in cluster.nodes)
    page.until("document.querySelector('#nodes').innerText.split('● here').length === 3")
    assert [row[0] for row in rows(page, "#nodes")] == [first, second]
    until_text(page, "#totals", "all respond")
    assert page.text("#datasets") == "Nothing is cached."
    assert page.text("#runs") == "No process reported a save."
    shot(page, "status-page-empty")


def test_status_page_reads_change_its_figures(page: Tab, cluster: LocalCluster, readers: None) -> None:
    until_text(page, "#datasets", "s3://speech/train/clips")
    until_text(page, "#jobs", "train-speech", "s3://speech/train/clips")
    before = page.text("#totals")
    page.until(f"document.querySelector('#totals').innerText !== {json.dumps(before)}")
    page.until(
        "[...document.querySelectorAll('#nodes tbody tr')].every(row => parseFloat(row.cells[3].innerText) > 50)"
    )
    [dataset] = rows(page, "#datasets")
    assert int(dataset[2]) >= OBJECTS
    assert all(node.address in dataset[4] for node in cluster.nodes)
    curves = page.evaluate("document.querySelectorAll('#charts .curve').length")
    assert curves == 5
    labels = page.evaluate("[...document.querySelectorAll('svg')].map(svg => svg.getAttribute('aria-label'))")
    assert all(labels)
    assert any(label.startswith("From the origin: ") for label in labels)
    fs = millrace.filesystem("s3", **cluster.arguments(cluster.nodes[0]))
    fs.pin("s3://speech/train")
    fs.limit("s3://images", quota="30MB", ttl="12h")
    rules = until_text(page, "#rules", "s3://speech/train", "s3://images")
    assert "pinned" in rules
    assert "quota 30.0 MB, removed after 12 h without use" in rules


def test_status_page_in_1200_pixels_shows_all_columns(browser: Chromium, cluster: LocalCluster, readers: None) -> None:
    tab = browser.open(link_of(cluster.nodes[0]), width=1200)
    until_text(tab, "#nodes", "Remarks", "shows this page")
    until_text(tab, "#jobs", "train-speech")
    for section in ("nodes", "datasets", "jobs"):
        assert (
            tab.evaluate(
                f"(table => table.scrollWidth - table.clientWidth)(document.querySelector('#{section} .scroll'))"
            )
            == 0
        )
    tab.close()


def test_status_watch_in_a_terminal_shows_the_reads(cluster: LocalCluster, readers: None, browser: Chromium) -> None:
    node = cluster.nodes[0]
    environment = {**os.environ, "MILLRACE_CLUSTER_TOKEN": TOKEN, "MILLRACE_CACHE_DIR": str(node.cache_dir)}
    command = [sys.executable, "-m", "millrace.cli", "status", "--watch", "--interval", "1"]
    with Terminal([*command, "--node", node.address], env=environment) as terminal:
        lines = terminal.until("hit ratio", "/s")
        if FOLDER:
            time.sleep(10)
            path = Path(FOLDER).absolute() / "status-watch.png"
            take_picture(browser, terminal.screen(), path)
            compress(path)
    assert terminal.status == 0
    assert any(line.startswith("hit ratio") for line in lines)


def test_status_page_of_a_running_load_shows_its_progress(
    page: Tab, cluster: LocalCluster, region: EmulatedRegion
) -> None:
    fs = millrace.filesystem("s3", **cluster.arguments(cluster.nodes[0]))
    # One object is cached, so that the load has progress at once: all others arrive at about the same time, at its end.
    fs.load("s3://images/val/0.parquet")
    region.reshape(round_trip_seconds=0.0, bytes_per_second=1e5)
    try:
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(fs.load, "s3://images/val/")
            until_text(page, "#loads", "s3://images/val")
            page.until("document.querySelector('#loads progress')?.value > 0")
            region.reshape(round_trip_seconds=0.0, bytes_per_second=None)
            assert loading.result(120).done_bytes == TOTAL
    finally:
        region.reshape(round_trip_seconds=0.0, bytes_per_second=None)
    until_text(page, "#loads", "No load is running.")
    until_text(page, "#datasets", "s3://images/val")


def test_status_page_after_saves_shows_the_run(
    page: Tab, cluster: LocalCluster, s3: S3Server, readers: None, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "MILLRACE_CACHE_DIR": str(cluster.nodes[0].cache_dir),
        "AWS_ACCESS_KEY_ID": s3.key,
        "AWS_SECRET_ACCESS_KEY": s3.secret,
        "AWS_ENDPOINT_URL": s3.endpoint_url,
    }
    log = tmp_path / "log"
    with ForkedProcess(torch_server(), _SAVE, "s3://runs/speech-17", log=log, env=environment, pipes=True) as saving:
        saving.output()
    until_text(page, "#runs", "step 300")
    [row] = rows(page, "#runs")
    assert row[0] == "s3://runs/speech-17"
    assert 0 < float(row[4]) < 1
    assert row[7:] == ["3", "✓ complete", cluster.nodes[0].address]
    assert rows(page, "#saves")[0][0] == cluster.nodes[0].address
    if FOLDER:
        time.sleep(120)  # for the charts
    shot(page, "status-page")


def test_status_page_after_a_node_was_killed_shows_it_as_silent(page: Tab, cluster: LocalCluster) -> None:
    first, second = cluster.nodes
    second.kill()
    try:
        until_text(page, "#nodes", "✕ silent")
        until_text(page, "#totals", "1 of 2", f"1 node silent: {second.address}")
        until_text(page, "#events", f"{second.address}: ⚠ the peer does not respond; reads skip it")
        shot(page, "status-page-node-killed", dark=True)
    finally:
        second.start()
        cluster.wait(second)
    until_text(page, "#totals", "all respond")
    until_text(page, "#events", f"{second.address}: the peer responds")
    assert not page.problems()
    first.kill()
    try:
        until_text(page, "#problem", "This node has not responded since ")
        assert not page.evaluate("document.querySelector('main').hidden")
    finally:
        first.start()
        cluster.wait(first)
    page.until("!document.querySelector('#problem').innerText")


def test_status_page_removes_the_token_from_the_address_and_loads_nothing_else(
    page: Tab, cluster: LocalCluster
) -> None:
    address = f"http://{cluster.nodes[0].address}/"
    assert page.evaluate("location.href") == address
    assert TOKEN not in page.evaluate("document.documentElement.outerHTML")
    loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert set(loaded) == {f"{address}status.json"}
    page.reload()
    page.until("!document.querySelector('main').hidden")  # the token is kept
    assert not page.problems()


def test_status_page_without_a_token_requests_it(browser: Chromium, cluster: LocalCluster) -> None:
    tab = browser.open(f"http://{cluster.nodes[1].address}/")
    tab.until("!document.querySelector('#login').hidden")
    assert tab.evaluate("document.querySelector('main').hidden")
    enter(tab, "a-wrong-token")
    until_text(tab, "#problem", "The node refused the token.")
    enter(tab, TOKEN)
    tab.until("!document.querySelector('main').hidden && !document.querySelector('#problem').innerText")
    tab.close()


def enter(tab: Tab, token: str) -> None:
    """Type a token, and press Enter."""
    assert tab.evaluate("document.activeElement.id") == "token"
    tab.call("Input.insertText", text=token)
    tab.press("Enter")


def test_status_page_with_the_keyboard_reaches_every_table(page: Tab) -> None:
    expected = page.evaluate("['Skip to the figures', 'Pause updates', ...regions()]".replace("regions()", _REGIONS))
    assert len(expected) > 2
    reached: list[str] = []
    while len(reached) < len(expected):
        page.press("Tab")
        name = "document.activeElement.ariaLabel || document.activeElement.textContent"
        reached.append(page.evaluate(f"document.activeElement === document.body ? null : {name}"))
    assert reached == expected


_REGIONS = "[...document.querySelectorAll('[role=region]')].map(region => region.ariaLabel)"


def test_status_page_that_is_paused_sends_no_requests(page: Tab) -> None:
    page.evaluate("document.querySelector('#pause').focus()")
    page.press("Enter")
    assert page.evaluate("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
    page.evaluate("window.sent = 0, fetch = (original => (...of) => (window.sent++, original(...of)))(fetch), 0")
    page.evaluate("new Promise(done => setTimeout(done, 2 * POLL_MS))")
    assert page.evaluate("window.sent") == 0
    page.press("Enter")
    page.until("window.sent > 0")
