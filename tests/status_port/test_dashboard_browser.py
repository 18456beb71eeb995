"""The dashboard in a real browser: a real server and workers, one of them slow, one killed, one of a hostile name."""

import json
import shutil
import time
from contextlib import ExitStack, contextmanager

import pytest
import torch
from support.fault_workers import worker_processes
from support.server_process import Peer, running_server
from support.waiting import eventually
from torch import nn

import psengine

HOSTILE = "<img src=x onerror=alert(1)>\"'&<script>window.hacked=1</script>"
# Whatever is not this machine does not resolve.
HOSTS = "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(event.blockedURI + event.violatedDirective));
window.addEventListener("error", (event) => window.violations.push(String(event.message)));
window.addEventListener("unhandledrejection", (event) => window.violations.push(String(event.reason)));
"""


def train(reports, address, job, pause_s):
    """A small classifier until the test says stop; every step sleeps ``pause_s``."""
    torch.manual_seed(0)
    model = psengine.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        strategy=psengine.AsyncServer(servers=address, job=job),
    )
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    centres = torch.randn(10, 64)
    while not reports.told():
        y = torch.randint(0, 10, (32,))
        loss = nn.functional.cross_entropy(model(centres[y] + torch.randn(32, 64)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.report(loss=loss.item(), samples=32)
        time.sleep(pause_s)
    model.leave()


@contextmanager
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (the extra dev)")
    driver_path, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver_path is None or chromium is None:
        pytest.skip("no chromium and chromedriver on PATH (Debian: the packages chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    arguments = "headless=new no-sandbox disable-gpu disable-dev-shm-usage disable-background-networking no-first-run"
    for argument in (*arguments.split(), "window-size=1280,1400", HOSTS):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        driver.set_page_load_timeout(20)
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": VIOLATIONS})
        yield driver
    finally:
        driver.quit()


def rows_of(driver):
    """By rank: the texts of a worker's cells, by the column's label, and its row's class."""
    rows = driver.execute_script(
        "return [...document.querySelectorAll('#workers-body tr')].map((row) =>"
        " [row.className, [...row.children].map((cell) => [cell.dataset.label || 'reason', cell.textContent])])"
    )
    return {int(dict(cells)["Rank"]): {**dict(cells), "class": kind} for kind, cells in rows}


def traces_of(driver, chart):
    """How many points each line of a chart has."""
    paths = driver.execute_script(
        f"return [...document.querySelectorAll('#{chart} path.trace')].map((path) => path.getAttribute('d'))"
    )
    return [path.count("L") for path in paths]


def text_of(driver, css):
    return driver.execute_script(f"return document.querySelector({json.dumps(css)}).textContent")


def test_a_diverged_worker_is_an_alarm_and_names_are_shown_as_text():
    weights = {"w": torch.ones(4)}
    with running_server() as server, browser() as driver, ExitStack() as clients:

        def join(rank, loss):
            client = clients.enter_context(psengine.connect(server.addresses[0], rank=rank))
            client.register(weights, torch.optim.SGD(list(weights.values()), lr=0.1))
            client.push_pull({"w": torch.zeros(4)}, into=weights)
            client.session.telemetry.report(loss=loss)

        join(0, 0.5)
        driver.get(server.status_url + "/")
        losses = (
            "return [...document.querySelectorAll('.tile')].filter((one) => one.textContent.startsWith('Loss'))"
            ".map((one) => [one.className, one.textContent])"
        )
        eventually(lambda: ["tile", "Loss0.5000 mean0.5000 to 0.5000"] in driver.execute_script(losses), "the loss")
        join(1, float("nan"))
        alarm = ["tile alarm", "Lossnan meannot finite: w1"]
        eventually(lambda: alarm in driver.execute_script(losses), "the alarm")
        assert {rank: row["Loss"] for rank, row in rows_of(driver).items()} == {0: "0.5000", 1: "nan"}
        assert text_of(driver, "#workers td.alarm") == "nan"
        assert text_of(driver, "#loss-about") == "not finite: w1"

        # A job and a host with markup for names are shown as they are.
        peer = clients.enter_context(Peer(server.addresses[0]))
        peer.job = HOSTILE
        assert peer.hello(host=HOSTILE).type.name == "WELCOME"
        jobs = "return document.getElementById('job').options.length"
        eventually(lambda: driver.execute_script(jobs) == 2, "two jobs")
        driver.execute_script(
            "const choice = document.getElementById('job'); choice.value = arguments[0];"
            "choice.dispatchEvent(new Event('change'));",
            HOSTILE,
        )
        eventually(lambda: rows_of(driver).get(0, {}).get("Host", "").startswith(HOSTILE), "the hostile host")
        eventually(lambda: HOSTILE in text_of(driver, "#log"), "the hostile event")
        assert driver.title.startswith(HOSTILE)
        made = "return [document.images.length, document.scripts.length, window.hacked]"
        assert driver.execute_script(made) == [0, 1, None]

        driver.execute_script("document.getElementById('pause').click()")
        assert text_of(driver, "#health") == "❚❚ paused"
        assert_harmless(driver, server)


def assert_harmless(driver, server):
    """The page ran its own code only, and asked its own server only."""
    assert driver.execute_script("return window.violations") == []
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    requests = [one["params"]["request"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    asked_of = {request["url"].split("?")[0].removeprefix(server.status_url) for request in requests}
    assert {url for url in asked_of if not url.startswith("data:")} == {"/", "/status.json"}


@pytest.mark.slow
def test_a_run_with_a_slow_and_a_killed_worker(tmp_path):
    with (
        running_server(shards=2, snapshot_dir=tmp_path / "snapshots") as server,
        worker_processes() as workers,
        browser() as driver,
    ):
        trainers = [
            workers.start(train, server.addresses[0], "digits", pause_s, rank=rank)
            for rank, pause_s in enumerate((0.02, 0.3, 0.02))
        ]
        driver.get(server.status_url + "/")
        looks = {0: "", 1: "slow", 2: ""}
        eventually(lambda: {rank: row["class"] for rank, row in rows_of(driver).items()} == looks, "one slow worker")
        assert "of the fastest" in rows_of(driver)[1]["State"]
        eventually(lambda: int(rows_of(driver)[1]["Lag"].replace(",", "")) > 20, "its lag")
        assert text_of(driver, "#health") == "✓ serving"
        assert text_of(driver, "#workers-about").startswith("1 slow · async")

        trainers[2].kill()
        evicted = eventually(lambda: (row := rows_of(driver)[2])["class"] == "gone" and row, "the killed one is out")
        assert "evicted" in evicted["State"]
        assert "silent" in evicted["reason"]
        assert int(evicted["Step"].replace(",", "")) > 0
        eventually(lambda: "worker 2 " in text_of(driver, "#log"), "the event")

        # Every chart shows what happened.
        eventually(lambda: min(traces_of(driver, "loss")[:2], default=0) >= 2, "losses")
        eventually(lambda: len(found := traces_of(driver, "updates")) == 2 and min(found) >= 2, "updates")
        assert len(traces_of(driver, "traffic")) == 4
        assert driver.execute_script("return document.querySelectorAll('#staleness rect').length") >= 4
        bars = driver.execute_script(
            "return [...document.querySelectorAll('#time-body tr')].map((row) =>"
            " [...row.querySelectorAll('.bar-track span')].map((part) => parseFloat(part.style.flexBasis)))"
        )
        assert [round(sum(parts)) for parts in bars] == [100, 100]

        for trainer in trainers[:2]:
            trainer.go()
            trainer.result()
        server.terminate()
        assert server.wait() == 0
        eventually(lambda: text_of(driver, "#health").startswith("✕ no answer since "), "silence")
        assert not driver.execute_script("return document.getElementById('silence').hidden")
        assert_harmless(driver, server)
