"""Every lower bound of pyproject.toml is tested in an environment of tests/matrix.py."""

import re

import matrix


def test_every_lower_bound_is_tested_in_some_environment() -> None:
    project = (matrix.ROOT / "pyproject.toml").read_text("utf-8").split("[project.scripts]")[0]
    tested = {tuple(package.split("==")) for e in matrix.ENVIRONMENTS.values() for package in e.packages}
    pinned = (matrix.ROOT / "constraints.txt").read_text("utf-8")
    tested |= {tuple(line.split("==")) for line in pinned.splitlines() if line.startswith("ray==")}  # make test-cluster
    bounds = set(re.findall(r'"([a-z-]+)(?:\[\w+\])?>=([\d.]+)"', project))
    assert {"torch", "numpy", "pillow", "pyarrow", "onnx"} <= {name for name, _ in bounds}
    for name, version in bounds:
        exact = (name, ".".join([*version.split("."), "0", "0"][:3]))
        assert exact in tested, f"no environment has {name} {version}"
