"""The lower bounds of pyproject.toml as pip constraints: each package at the oldest version that is said to do."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for requirement in project["dependencies"] + extras["quickstart"] + extras["trl"] + extras["data"] + extras["dev"]:
    bound = re.match(r"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)", requirement)
    if bound:
        print(f"{bound[1]}=={bound[2]}")
