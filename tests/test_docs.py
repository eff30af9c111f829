"""README and docs: every example runs, every figure is the one of its result file, every link leads somewhere."""

import functools
import html
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import shallow_model
import textstat
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient.cli import main
from hf_efficient.kernels.replay.recorder import interpreter


ROOT = Path(__file__).resolve().parents[1]
FILES = {str(path.relative_to(ROOT / "docs").with_suffix("")): path for path in sorted((ROOT / "docs").rglob("*.md"))}
FILES = {"README": ROOT / "README.md", **FILES}
PAGES = {page: path.read_text() for page, path in FILES.items()}
MADE = ("api", "benchmarks")  # pages without prose of their own
TEXT = "The river runs past the old mill, past the bridge and into the sea, where ships wait for the tide. " * 60
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL = {  # command -> arguments that make it quick
    "run": ["--windows", "2", "--new-tokens", "4", "--repeats", "1"],
    "bench": ["--batch", "2", "--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1"],
    **dict.fromkeys(("quantize", "prune", "prune-structure"), ["--num-samples", "2", "--sequence-length", "64"]),
}
# in examples: what makes them quick, and a size for the small model
QUICK = {"num_samples=8": "num_samples=2", "minutes=0.1": "minutes=0.02", "1280": "320"}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], flags=re.S | re.M)


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if blocks(page, language)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder of a reader, who has a text to calibrate with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calibration.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_examples_run_one_after_another(page, folder, none_adopted):
    """On the whole model: tests/integrations/test_real_model.py."""
    if page == "serving" and interpreter() is None:
        pytest.skip("drafts in continuous batching need the C++ kernels")
    namespace = {"__name__": page}
    for number, block in enumerate(blocks(page, "python")):
        for text, quick in {MODEL_ID: str(shallow_model.folder()), **QUICK}.items():
            block = block.replace(text, quick)
        exec(compile(block, f"{page}, block {number}", "exec"), namespace)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands_run(page, sample_model, folder, monkeypatch, capsys):
    """In this process: `hf-efficient` calls the same function."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    for line in lines:
        words = shlex.split(line, comments=True)
        variables = dict(word.split("=", 1) for word in itertools.takewhile(re.compile(r"[A-Z_]+=").match, words))
        command, *_ = words = words[len(variables) :]
        if words[:3] == ["python", "-m", "build"]:  # tests/kernels/test_prebuilt.py compiles what it would
            continue
        if command == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M), line
            continue
        assert command == "hf-efficient", line
        if words[1] in ("exec", "serve"):  # tests/cli/test_exec.py and tests/integrations/test_serving.py run these
            continue
        prepare(words, shallow_model.folder())
        model = sample_model if words[1] == "estimate" else shallow_model.folder()
        words = [word.replace(MODEL_ID, str(model)).replace("1280", QUICK["1280"]) for word in words]
        with monkeypatch.context() as changed:
            for name, value in variables.items():
                changed.setenv(name, value)
            assert main([*words[1:], *SMALL.get(words[1], [])]) == 0, capsys.readouterr().err
        printed = capsys.readouterr().out.strip()
        if words[1] == "estimate":
            assert printed in [block.strip() for block in blocks(page, "text")], "what the command prints"


def prepare(words: list[str], model: Path) -> None:
    """Makes the compressed folder that a command takes, as the quick start does."""
    if words[2:] and words[2] == "smollm2-int4" and not Path("smollm2-int4").exists():
        import hf_efficient

        config = hf_efficient.WeightOnlyConfig(bits=4, group_size=64)
        AutoModelForCausalLM.from_pretrained(model, quantization_config=config).save_pretrained("smollm2-int4")
        AutoTokenizer.from_pretrained(model).save_pretrained("smollm2-int4")


def test_figures_are_those_of_their_result_files():
    command = [sys.executable, str(ROOT / "docs" / "figures.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_results_say_where_they_come_from():
    for name in ("demo_cpu", "cpu_generate"):
        environment = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["environment"]
        assert all(environment[key] for key in ("hardware", "versions", "commit", "command"))


def test_the_readme_is_short():
    assert len(PAGES["README"]) <= 12_000


def prose(page: str) -> str:
    """The sentences of a page: no code, tables, headings and link targets."""
    text = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.S | re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<!--.*?-->", "", text, flags=re.S))
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    return re.sub(r"`[^`]*`", "it", "\n".join(lines)).replace("*", "")


@pytest.mark.parametrize("page", [page for page in PAGES if page not in MADE])
def test_pages_are_easy_to_read(page):
    text = prose(page)
    sentences = [s for part in re.split(r"\n\s*\n|\n- ", text) for s in re.split(r"(?<=[.!?:;])\s+", part) if s.strip()]
    longest = max(sentences, key=lambda sentence: len(sentence.split()))
    assert len(longest.split()) <= 40, longest
    assert textstat.flesch_reading_ease(text) >= 50


def test_each_trouble_is_part_of_a_message():
    """Headings of the page are parts of messages that this package raises, or that torch does."""
    folders = (ROOT / "hf_efficient", ROOT / "integrations")
    source = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # strings that go on in the next line
    others = {"size mismatch", "Another text than transformers wrote"}
    headings = re.findall(r"^## (.*)", PAGES["troubleshooting"], flags=re.M)
    assert [heading for heading in headings if heading not in source and heading not in others] == []


class Links(HTMLParser):
    """The targets and the anchors of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.targets, self.anchors = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id"))
        self.targets |= {attributes[name] for name in ("href", "src") if attributes.get(name)}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    config = (ROOT / "mkdocs.yml").read_text()
    (folder / "mkdocs.yml").write_text(config.replace("output/site", "site").replace("paths: [.]", f"paths: [{ROOT}]"))
    command = [str(Path(sys.executable).with_name("zensical")), "build", "-f", str(folder / "mkdocs.yml")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0 and "Warning" not in result.stdout, result.stdout + result.stderr
    return folder / "site"


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_its_links_lead_somewhere(site):
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 15
    broken = []
    for path, links in pages.items():
        for target in links.targets:
            file, _, anchor = target.partition("#")
            if re.match(r"(https?|mailto|data):", target) or path.name == "404.html":
                continue
            aim = (path.parent / file.partition("?")[0]).resolve() if file else path
            aim = aim / "index.html" if aim.is_dir() else aim
            if not aim.exists() or (anchor and aim in pages and anchor not in pages[aim].anchors):
                broken.append(f"{path.name}: {target}")
    assert broken == []


VISIT = """<!doctype html><body><script type="module">
const open = (page) => new Promise((done) => {
  const frame = document.createElement("iframe");
  frame.onload = () => done(frame.contentDocument);
  frame.src = page;
  document.body.append(frame);
});
const read = async (path) => {
  const answer = await fetch(path);
  return answer.ok && new DOMParser().parseFromString(await answer.text(), "text/html");
};
const found = {opened: [], followed: 0, faults: []}, targets = {};
for (const page of PAGES) {
  const shown = await open(page);
  found.opened.push(page);
  if (!shown.querySelector("h1")?.getBoundingClientRect().height) found.faults.push(`${page} shows no heading`);
  for (const link of shown.links) {
    if (link.origin !== location.origin) continue;
    const target = (targets[link.pathname] ??= await read(link.pathname));
    const anchor = decodeURIComponent(link.hash.slice(1));
    if (!target || (anchor && !target.getElementById(anchor))) found.faults.push(`${page}: ${link.href}`);
    found.followed += 1;
  }
}
document.body.innerHTML = `<pre>${JSON.stringify(found)}</pre>`;
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs apt-get install chromium")
def test_a_browser_shows_every_page_and_follows_every_link(site):
    pages = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    (site / "visit.html").write_text(VISIT.replace("PAGES", json.dumps(pages)))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        url = f"http://127.0.0.1:{server.server_port}/visit.html"
        shown = subprocess.run(
            [*command, "--virtual-time-budget=60000", url], capture_output=True, text=True, timeout=120
        ).stdout
        server.shutdown()
    (site / "visit.html").unlink()
    report = re.search("<pre>(.*)</pre>", shown)
    assert report, shown[-2000:]
    found = json.loads(html.unescape(report[1]))
    assert found["opened"] == pages and found["followed"] > 300 and found["faults"] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_to_files(page):
    here = FILES[page].parent
    targets = re.findall(r"\]\(([^)#\s]+)", PAGES[page])
    assert [t for t in targets if not t.startswith("http") and not (here / t).exists()] == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "AGENTS.md"])
def test_paths_named_for_contributors_exist(page):
    names = re.findall(r"`([\w./-]+)`", (ROOT / page).read_text())
    paths = [name for name in names if "/" in name and name != "kernels/__init__.py"]  # of that one: that it must not
    assert len(paths) > 1 and [path for path in paths if not (ROOT / path).exists()] == []
