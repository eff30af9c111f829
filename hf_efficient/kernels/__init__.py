"""Kernels and the torch ops that choose between them.

The kernel folders `kernels/<name>/torch-ext/<package>` of the repository are kernel-builder projects that can be published
to the Hub as they stand; setup.cfg installs them as `hf_efficient.kernels.<package>`. From a checkout that is not
installed they are found through `__path__`, which this file extends.
"""

from pathlib import Path


for _source in sorted((Path(__file__).resolve().parents[2] / "kernels").glob("*/torch-ext")):
    __path__.append(str(_source))
