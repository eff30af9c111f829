"""Kernels and the torch ops that choose between them.

The folders `kernels/<name>/torch-ext/<package>` of the repository are kernel-builder projects, which the Hub takes as
they stand. setup.cfg installs them as `hf_efficient.kernels.<package>`; in a checkout that is not installed, `__path__`
finds them.
"""

from pathlib import Path


for _source in sorted((Path(__file__).resolve().parents[2] / "kernels").glob("*/torch-ext")):
    __path__.append(str(_source))
